mod types;
pub use types::*;
