//! What an engine does while it generates nothing.

use serde::{Deserialize, Serialize};

/// What becomes of the engine from the end of generating to the next step (`engine.sleep`). Its
/// weights stay in every case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Sleep {
    /// It stays awake.
    #[default]
    Off,
    /// It makes no step; the pool keeps its order and its bytes.
    KeepPool,
    /// The pool's memory is free for others; the engine wakes with a pool as at the start.
    DropPool,
}
