//! Text to token ids and back.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tokenizers::Tokenizer;

use super::RolloutError;
use crate::base::TokenId;

/// The ids that a model uses for something other than text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SpecialTokens {
    pub pad: Option<TokenId>,
    /// Put in front of every prompt of a model whose tokens are bytes. A tokenizer.json has its
    /// own say in what it adds to a prompt.
    pub bos: Option<TokenId>,
    /// Every id that ends a completion. The first one ends what the model is taught.
    pub eos: Vec<TokenId>,
}

impl SpecialTokens {
    /// One id may have several uses; how a completion ends matters most to a reader.
    fn name(&self, id: TokenId) -> Option<&'static str> {
        if self.eos.contains(&id) {
            Some("eos")
        } else if self.bos == Some(id) {
            Some("bos")
        } else if self.pad == Some(id) {
            Some("pad")
        } else {
            None
        }
    }

    fn all(&self) -> impl Iterator<Item = TokenId> + '_ {
        self.eos.iter().copied().chain(self.bos).chain(self.pad)
    }
}

/// One model's text.
///
/// Without a tokenizer.json the token ids 0 to 255 are bytes, save those that the model uses as
/// special tokens: such a byte is refused in text.
pub struct Codec {
    vocabulary: Vocabulary,
    special: SpecialTokens,
}

enum Vocabulary {
    Bytes,
    File { tokenizer: Box<Tokenizer>, path: PathBuf },
}

/// Stands for whatever is not text, so that no reward takes it for text.
const NOT_TEXT: char = char::REPLACEMENT_CHARACTER;

impl Codec {
    /// Reads `folder/tokenizer.json` where there is one.
    ///
    /// # Errors
    /// A file that cannot be read or holds an id outside `vocab_size`; no file and a vocabulary
    /// smaller than the bytes; special ids outside the vocabulary.
    pub fn open(
        folder: &Path,
        vocab_size: u32,
        special: SpecialTokens,
    ) -> Result<Self, RolloutError> {
        let path = folder.join("tokenizer.json");
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Self::bytes(vocab_size, special);
            }
            Err(error) => {
                return Err(RolloutError::TokenizerFile { path, source: error.into() });
            }
        };
        check_special(&special, vocab_size)?;
        let tokenizer = match read_tokenizer(&text) {
            Ok(tokenizer) => Box::new(tokenizer),
            Err(source) => return Err(RolloutError::TokenizerFile { path, source }),
        };
        if let Some((token, id)) = tokenizer.get_vocab(true).into_iter().max_by_key(|&(_, id)| id) {
            if id >= vocab_size {
                return Err(RolloutError::TokenizerTooLarge { path, id, token, vocab_size });
            }
        }
        Ok(Self { vocabulary: Vocabulary::File { tokenizer, path }, special })
    }

    /// For a model without a folder.
    ///
    /// # Errors
    /// A vocabulary smaller than the bytes; special ids outside the vocabulary.
    pub fn bytes(vocab_size: u32, special: SpecialTokens) -> Result<Self, RolloutError> {
        if vocab_size < 256 {
            return Err(RolloutError::TooFewIdsForBytes { vocab_size });
        }
        check_special(&special, vocab_size)?;
        Ok(Self { vocabulary: Vocabulary::Bytes, special })
    }

    #[must_use]
    pub fn special(&self) -> &SpecialTokens {
        &self.special
    }

    /// The text alone, nothing added.
    ///
    /// # Errors
    /// A byte that the model uses as a special token; a text that the tokenizer refuses.
    pub fn encode(&self, text: &str) -> Result<Vec<TokenId>, RolloutError> {
        match &self.vocabulary {
            Vocabulary::Bytes => self.encode_bytes(text),
            Vocabulary::File { tokenizer, path } => encode_with(tokenizer, path, text, false),
        }
    }

    /// Whether the text can be encoded, as far as that is known without the work.
    ///
    /// # Errors
    /// A byte that the model uses as a special token.
    pub fn check(&self, text: &str) -> Result<(), RolloutError> {
        match &self.vocabulary {
            Vocabulary::Bytes => self.encode_bytes(text).map(drop),
            Vocabulary::File { .. } => Ok(()),
        }
    }

    /// The text as a prompt: a BOS token in front where the model has one, or whatever the
    /// tokenizer.json adds.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<TokenId>, RolloutError> {
        match &self.vocabulary {
            Vocabulary::Bytes => {
                let mut ids: Vec<TokenId> = self.special.bos.into_iter().collect();
                ids.extend(self.encode_bytes(text)?);
                Ok(ids)
            }
            Vocabulary::File { tokenizer, path } => encode_with(tokenizer, path, text, true),
        }
    }

    /// The text as a whole completion: ends in the model's first end token, if it has any.
    ///
    /// # Errors
    /// As [`Self::encode`].
    pub fn encode_completion(&self, text: &str) -> Result<Vec<TokenId>, RolloutError> {
        let mut ids = self.encode(text)?;
        ids.extend(self.special.eos.first());
        Ok(ids)
    }

    /// For people to read: special tokens are named (`<eos>`), bytes that are not UTF-8 are
    /// escaped (`\xff`), ids outside the tokenizer are numbered (`<id 300>`).
    #[must_use]
    pub fn decode(&self, ids: &[TokenId]) -> String {
        self.render(ids, &mut |odd, text| match odd {
            Odd::Special(name) => text.push_str(&format!("<{name}>")),
            Odd::Unknown(id) => text.push_str(&format!("<id {id}>")),
            Odd::Byte(byte) => text.push_str(&format!("\\x{byte:02x}")),
        })
    }

    /// For rewards: the text before the first end token, and whether there is an end token.
    ///
    /// All that is not text becomes U+FFFD. Escapes would hold digits and letters, and a model
    /// learns to emit byte 0x19 where 19 earns a reward.
    #[must_use]
    pub fn decode_answer(&self, ids: &[TokenId]) -> (String, bool) {
        let end = ids.iter().position(|id| self.special.eos.contains(id));
        let text = self.render(&ids[..end.unwrap_or(ids.len())], &mut |_, text| {
            text.push(NOT_TEXT);
        });
        (text, end.is_some())
    }

    fn encode_bytes(&self, text: &str) -> Result<Vec<TokenId>, RolloutError> {
        let encode = |(offset, byte)| {
            let id = TokenId::new(u32::from(byte));
            match self.special.name(id) {
                None => Ok(id),
                Some(name) => {
                    Err(RolloutError::ReservedByte { byte, offset, name, text: excerpt(text) })
                }
            }
        };
        text.bytes().enumerate().map(encode).collect()
    }

    /// Decodes runs of text; `write_odd` writes each thing between them.
    fn render(&self, ids: &[TokenId], write_odd: &mut dyn FnMut(Odd, &mut String)) -> String {
        let mut text = String::new();
        for run in ids.chunk_by(|&a, &b| self.is_text(a) && self.is_text(b)) {
            if self.is_text(run[0]) {
                self.render_run(run, &mut text, write_odd);
            } else {
                let odd = self.special.name(run[0]).map_or(Odd::Unknown(run[0]), Odd::Special);
                write_odd(odd, &mut text);
            }
        }
        text
    }

    fn is_text(&self, id: TokenId) -> bool {
        self.special.name(id).is_none()
            && match &self.vocabulary {
                Vocabulary::Bytes => id.get() < 256,
                Vocabulary::File { tokenizer, .. } => tokenizer.id_to_token(id.get()).is_some(),
            }
    }

    fn render_run(
        &self,
        run: &[TokenId],
        text: &mut String,
        write_odd: &mut dyn FnMut(Odd, &mut String),
    ) {
        match &self.vocabulary {
            Vocabulary::Bytes => {
                let byte = |id: &TokenId| u8::try_from(id.get()).expect("a run of text is bytes");
                let bytes: Vec<u8> = run.iter().map(byte).collect();
                for chunk in bytes.utf8_chunks() {
                    text.push_str(chunk.valid());
                    for &byte in chunk.invalid() {
                        write_odd(Odd::Byte(byte), text);
                    }
                }
            }
            Vocabulary::File { tokenizer, .. } => {
                let ids: Vec<u32> = run.iter().map(|id| id.get()).collect();
                match tokenizer.decode(&ids, false) {
                    Ok(decoded) => text.push_str(&decoded),
                    Err(_) => run.iter().for_each(|&id| write_odd(Odd::Unknown(id), text)),
                }
            }
        }
    }
}

/// Something in a completion that is not text.
enum Odd {
    Special(&'static str),
    Unknown(TokenId),
    Byte(u8),
}

fn check_special(special: &SpecialTokens, vocab_size: u32) -> Result<(), RolloutError> {
    match special.all().find(|id| id.get() >= vocab_size) {
        None => Ok(()),
        Some(id) => {
            let name = special.name(id).expect("every special id has a name");
            Err(RolloutError::SpecialOutsideVocabulary { name, id: id.get(), vocab_size })
        }
    }
}

fn read_tokenizer(text: &str) -> tokenizers::Result<Tokenizer> {
    let mut tokenizer: Tokenizer = text.parse()?;
    // Files keep the training run's truncation and padding, which would cut or pad prompts.
    tokenizer.with_truncation(None)?;
    tokenizer.with_padding(None);
    Ok(tokenizer)
}

fn encode_with(
    tokenizer: &Tokenizer,
    path: &Path,
    text: &str,
    as_prompt: bool,
) -> Result<Vec<TokenId>, RolloutError> {
    match tokenizer.encode_fast(text, as_prompt) {
        Ok(encoding) => Ok(encoding.get_ids().iter().map(|&id| TokenId::new(id)).collect()),
        Err(source) => {
            Err(RolloutError::Encode { path: path.to_owned(), text: excerpt(text), source })
        }
    }
}

/// The start of a text, for messages.
pub(super) fn excerpt(text: &str) -> String {
    const CHARS: usize = 60;
    match text.char_indices().nth(CHARS) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}...", &text[..end]),
    }
}

#[cfg(test)]
mod tests;
