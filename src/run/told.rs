//! An error in one line.

/// The error and its causes, without those that the message before them quotes already.
#[must_use]
pub fn told(error: &anyhow::Error) -> String {
    error.chain().fold(String::new(), |text, cause| {
        let cause = cause.to_string();
        match text.is_empty() {
            true => cause,
            false if text.contains(&cause) => text,
            false => format!("{text}: {cause}"),
        }
    })
}
