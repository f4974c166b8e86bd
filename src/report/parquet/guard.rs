//! Parquet's crate panics at pages that are torn in ways it does not expect, such as a dictionary
//! that is shorter than its header says. Nothing in a file that is not decoded yet tells them apart
//! from whole ones, so what the crate does is stopped here and told as an error.

use std::any::Any;
use std::cell::Cell;
use std::panic::{catch_unwind, set_hook, take_hook, AssertUnwindSafe};
use std::sync::Once;

use ::parquet::errors::{ParquetError, Result};

thread_local! {
    /// Whether this thread is decoding, so that its panics are an error's words and not a crash's.
    static DECODING: Cell<bool> = const { Cell::new(false) };
}

/// What `decode` returns, or an error with the words of its panic.
pub(super) fn guarded<T>(decode: impl FnOnce() -> Result<T>) -> Result<T> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let report = take_hook();
        set_hook(Box::new(move |panic| {
            if !DECODING.get() {
                report(panic);
            }
        }));
    });
    DECODING.set(true);
    let done = catch_unwind(AssertUnwindSafe(decode));
    DECODING.set(false);
    done.unwrap_or_else(|panic| Err(ParquetError::General(words(&*panic))))
}

fn words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    format!("the file is damaged: {}", text.unwrap_or("it cannot be decoded"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_an_error_and_the_next_one_is_a_panic_again() {
        let short: Vec<u8> = Vec::new();
        let error = guarded(|| Ok(short[4])).unwrap_err().to_string();
        let expect =
            "Parquet error: the file is damaged: index out of bounds: the len is 0 but the \
                      index is 4";
        assert_eq!(error, expect);
        assert_eq!(guarded(|| Ok(7)).unwrap(), 7);
        assert!(!DECODING.get());
    }
}
