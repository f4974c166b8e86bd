use proptest::prelude::*;

use super::*;

fn ids(numbers: &[u32]) -> Vec<TokenId> {
    numbers.iter().map(|&id| TokenId::new(id)).collect()
}

fn special() -> SpecialTokens {
    let id = |id| Some(TokenId::new(id));
    SpecialTokens { pad: id(0), bos: id(1), eos: ids(&[2, 7]) }
}

fn bytes() -> Codec {
    Codec::bytes(300, special()).unwrap()
}

/// A file of six words that puts `<s>` in front and cuts texts to two tokens.
const WORDS: &str = include_str!("../../../tests/fixtures/words/tokenizer.json");

fn open(tokenizer: &str, vocab_size: u32, eos: &[u32]) -> Result<Codec, RolloutError> {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("tokenizer.json"), tokenizer).unwrap();
    let special = SpecialTokens { pad: None, bos: Some(TokenId::new(1)), eos: ids(eos) };
    Codec::open(folder.path(), vocab_size, special)
}

#[test]
fn bytes_are_ids() {
    let codec = bytes();
    assert_eq!(codec.encode("1+\u{e9}").unwrap(), ids(&[49, 43, 0xc3, 0xa9]));
    assert_eq!(codec.encode_prompt("a").unwrap(), ids(&[1, 97]));
    assert_eq!(codec.encode_completion("a").unwrap(), ids(&[97, 2]));
    let bare = Codec::bytes(256, SpecialTokens::default()).unwrap();
    assert_eq!(bare.encode_prompt("\0a").unwrap(), ids(&[0, 97]));
    assert_eq!(bare.encode_completion("a").unwrap(), ids(&[97]));
}

#[test]
fn bytes_of_special_tokens_are_refused() {
    for (text, byte, offset, name) in [
        ("ab\0", 0, 2, "pad"),
        ("\u{1}", 1, 0, "bos"),
        ("\u{e9}\u{2}", 2, 2, "eos"),
        ("\u{7}", 7, 0, "eos"),
    ] {
        let expected = format!(
            "byte {byte:#04x} at offset {offset} of {text:?} cannot be text: the model uses \
             token id {byte} as {name}; take the byte out"
        );
        assert_eq!(bytes().encode(text).unwrap_err().to_string(), expected);
        assert_eq!(bytes().check(text).unwrap_err().to_string(), expected);
    }
}

#[test]
fn whatever_is_not_text_is_shown() {
    for (numbers, shown) in [
        (&[][..], ""),
        (&[1, 104, 105, 2, 0, 7], "<bos>hi<eos><pad><eos>"),
        (&[104, 0xff, 105], "h\\xffi"),
        (&[0xc3, 2, 0xa9], "\\xc3<eos>\\xa9"),
        (&[0xe2, 0x82, 0xac, 0xe2, 0x82], "\u{20ac}\\xe2\\x82"),
        (&[256, 104, 299], "<id 256>h<id 299>"),
        (&[10, 9], "\n\t"),
    ] {
        assert_eq!(bytes().decode(&ids(numbers)), shown, "{numbers:?}");
    }
}

/// The first end token of the model's list ends the answer, whichever it is.
#[test]
fn an_answer_ends_at_its_first_end_token_and_holds_no_escapes() {
    for (numbers, text, ended) in [
        (&[][..], "", false),
        (&[2], "", true),
        (&[49, 57], "19", false),
        (&[49, 57, 7, 50, 2], "19", true),
        (&[49, 0, 57, 2], "1\u{fffd}9", true),
        (&[0x80, 2], "\u{fffd}", true),
        (&[256, 2], "\u{fffd}", true),
    ] {
        assert_eq!(bytes().decode_answer(&ids(numbers)), (text.to_owned(), ended), "{numbers:?}");
    }
}

#[test]
fn a_tokenizer_file_is_used_where_there_is_one() {
    let codec = open(WORDS, 8, &[2]).unwrap();
    // Neither cut to the file's two tokens nor given a second BOS.
    assert_eq!(codec.encode("two and two").unwrap(), ids(&[3, 4, 3]));
    assert_eq!(codec.encode_prompt("two and two").unwrap(), ids(&[1, 3, 4, 3]));
    assert_eq!(codec.encode_completion("is").unwrap(), ids(&[5, 2]));
    assert_eq!(codec.decode(&ids(&[1, 3, 4, 2, 7])), "<bos>two and<eos><id 7>");
    assert_eq!(codec.decode_answer(&ids(&[3, 7, 2, 4])), ("two\u{fffd}".to_owned(), true));
}

#[test]
fn a_folder_without_one_holds_bytes() {
    let folder = tempfile::tempdir().unwrap();
    let codec = Codec::open(folder.path(), 256, special()).unwrap();
    assert_eq!(codec.encode("two").unwrap(), ids(&[116, 119, 111]));
}

#[test]
fn impossible_vocabularies_are_refused() {
    let check = |found: Result<Codec, RolloutError>, expected: &str| {
        let message = found.err().expect("refused").to_string();
        assert!(message.contains(expected), "{message}");
    };
    check(Codec::bytes(255, special()), "vocabulary of 255 is too small for bytes");
    let far = SpecialTokens { eos: ids(&[2, 300]), ..special() };
    check(Codec::bytes(300, far), "the eos token id 300 is outside the model's vocabulary of 300");
    check(open(WORDS, 8, &[8]), "the eos token id 8 is outside the model's vocabulary of 8");
    check(open(WORDS, 5, &[2]), "tokenizer.json: token id 5 (\"is\") is outside the model's");
    check(open("{", 8, &[2]), "tokenizer.json: EOF while parsing");
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("tokenizer.json")).unwrap();
    check(Codec::open(folder.path(), 256, special()), "tokenizer.json: Is a directory");
}

proptest! {
    #[test]
    fn text_comes_back(text in "[^\u{0}-\u{7}]*") {
        let codec = bytes();
        let completion = codec.encode_completion(&text).unwrap();
        prop_assert_eq!(codec.decode_answer(&completion), (text.clone(), true));
        prop_assert_eq!(codec.decode(&codec.encode(&text).unwrap()), text);
    }

    #[test]
    fn decoding_never_fails(numbers in proptest::collection::vec(0..400_u32, 0..40)) {
        let words = open(WORDS, 8, &[2]).unwrap();
        for codec in [&bytes(), &words] {
            let tokens = ids(&numbers);
            let _ = codec.decode(&tokens);
            let (_, ended) = codec.decode_answer(&tokens);
            prop_assert_eq!(ended, tokens.iter().any(|id| codec.special().eos.contains(id)));
        }
    }
}
