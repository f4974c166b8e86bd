//! Servers as the engine: the client against a scripted server that fails in every way that real
//! ones do, and whole runs over it. Nothing here leaves loopback.

#[path = "../common/mod.rs"]
mod common;

mod answers;
mod context;
mod dumps;
mod launch;
mod scripted;
mod waiting;
mod whole;
