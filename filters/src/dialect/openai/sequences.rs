//! Texts that are read apart: the `prompt` of text completions and the `input` of embeddings.
//!
//! Both are a text, a list of texts, a list of token numbers, or a list of such lists. Token numbers are
//! counted exactly; what a tokenizer puts around each text is bounded.

use super::super::fields::{elements, invalid, size};
use crate::facts::Input;
use crate::verdict::Rejection;

/// What a tokenizer may put around one text (its begin and end), at most.
const TOKENS_PER_TEXT: u64 = 4;

/// Reads them into the input of a request whose body has so many bytes.
pub(super) fn read(text: &str, field: &'static str, body_bytes: u64) -> Result<Input, Rejection> {
    let what = "must be a text, a list of texts, a list of tokens, or a list of such lists";
    let mut input = Input { bytes: body_bytes, ..Input::default() };
    if text.starts_with('"') {
        input.text(text);
    } else if text.starts_with('[') {
        list(text, &mut input).map_err(|why| invalid(field, &format!("{what} ({why})")))?;
    } else {
        return Err(invalid(field, what));
    }
    if input.texts == 0 {
        return Err(invalid(field, "must not be an empty list"));
    }
    input.template_tokens = input.texts.saturating_mul(TOKENS_PER_TEXT);
    Ok(input)
}

/// A list of texts, of lists of tokens, or one list of tokens.
fn list(text: &str, input: &mut Input) -> Result<(), String> {
    let mut numbers = 0_u64;
    elements(text, |element| match element.as_bytes().first() {
        Some(b'"') if numbers == 0 => {
            input.text(element);
            Ok(())
        }
        Some(b'[') if numbers == 0 => {
            input.texts += 1;
            let mut own = 0_u64;
            elements(element, |token| is_token(token).map(|()| own += 1))?;
            input.numbers(element, own);
            Ok(())
        }
        _ if input.texts == 0 => is_token(element).map(|()| numbers += 1),
        _ => Err("its elements are of several kinds".to_owned()),
    })?;
    if numbers > 0 {
        input.texts = 1;
        input.numbers(text, numbers);
    }
    Ok(())
}

fn is_token(text: &str) -> Result<(), String> {
    let sound = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    if sound { Ok(()) } else { Err(format!("`{}` is no token", text.chars().take(20).collect::<String>())) }
}

impl Input {
    fn text(&mut self, json: &str) {
        self.texts += 1;
        self.text_bytes = self.text_bytes.saturating_add(size(json).saturating_sub(2));
    }

    /// Token numbers are tokens, not bytes.
    fn numbers(&mut self, json: &str, tokens: u64) {
        self.tokens = self.tokens.saturating_add(tokens);
        self.bytes = self.bytes.saturating_sub(size(json));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Texts, bytes of text, tokens, and what is left of a body of 1000 bytes.
    fn seen(text: &str) -> Option<(u64, u64, u64, u64)> {
        let input = read(text, "input", 1000).ok()?;
        assert_eq!(input.template_tokens, input.texts * 4);
        Some((input.texts, input.text_bytes, input.tokens, input.bytes))
    }

    #[test]
    fn every_form_is_counted() {
        assert_eq!(seen(r#""abc""#), Some((1, 3, 0, 1000)));
        assert_eq!(seen(r#"["abc","de",""]"#), Some((3, 5, 0, 1000)));
        assert_eq!(seen("[15339, 1917]"), Some((1, 0, 2, 987)));
        assert_eq!(seen("[[1,2,3],[100257],[]]"), Some((3, 0, 4, 1000 - 7 - 8 - 2)));
    }

    #[test]
    fn what_is_none_of_them_is_refused() {
        for text in [
            "null",
            "1",
            "{}",
            "[]",
            "[1.5]",
            "[-1]",
            "[1,\"a\"]",
            "[\"a\",1]",
            "[[1],2]",
            "[[\"a\"]]",
            "[null]",
            "[{}]",
        ] {
            assert_eq!(seen(text), None, "{text}");
        }
    }
}
