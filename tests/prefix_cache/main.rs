//! The prefix cache: what is found is what would have been computed, to the bit; and what it shows
//! when it is kept too long, pinned too late or given back twice.

#[path = "../common/mod.rs"]
mod common;
mod exact;
mod faults;
