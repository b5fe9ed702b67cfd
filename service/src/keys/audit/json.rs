// SPDX-License-Identifier: Apache-2.0
//! Writes long lists as JSON, for a fraction of the instructions of a general serialiser.

use serde::Serialize;

/// Adds a field with a list to the text of an object. `write` appends the text of one item.
pub(super) fn add_list<T>(
    object: &mut String,
    name: &str,
    items: &[T],
    mut write: impl FnMut(&mut String, &T) -> serde_json::Result<()>,
) -> serde_json::Result<()> {
    /// Room for an item with a name of usual length.
    const ITEM_BYTES: usize = 80;
    // One more byte leaves room for the end of the line.
    object.reserve((items.len() + 1).saturating_mul(ITEM_BYTES));
    open(object);
    add_text(object, name)?;
    object.push_str(":[");
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            object.push(',');
        }
        write(object, item)?;
    }
    object.push_str("]}");
    Ok(())
}

/// Adds the fields of another object to the text of an object.
pub(super) fn join(object: &mut String, other: &str) {
    if other != "{}" {
        open(object);
        object.push_str(other.strip_prefix('{').unwrap_or(other));
    }
}

/// Appends an object whose first field is a key's name. `rest` is the text after the name.
pub(super) fn add_keyed(to: &mut String, key: &str, rest: &str) -> serde_json::Result<()> {
    to.push_str("{\"key\":");
    add_text(to, key)?;
    to.push_str(rest);
    Ok(())
}

/// Makes room for another field in the text of an object.
fn open(object: &mut String) {
    object.pop();
    if object.len() > 1 {
        object.push(',');
    }
}

/// Tells for each byte whether a JSON string contains it as it is.
static PLAIN: [bool; 256] = {
    let mut plain = [false; 256];
    let mut byte = b' ';
    while byte <= b'~' {
        plain[byte as usize] = byte != b'"' && byte != b'\\';
        byte += 1;
    }
    plain
};

/// Appends a string in quotes.
fn add_text(to: &mut String, text: &str) -> serde_json::Result<()> {
    // Most names are too short for a check of many bytes at once to be faster.
    if text.bytes().all(|byte| PLAIN[usize::from(byte)]) {
        to.push('"');
        to.push_str(text);
        to.push('"');
        Ok(())
    } else {
        add(to, &text)
    }
}

/// Appends a value.
pub(super) fn add(to: &mut String, value: &impl Serialize) -> serde_json::Result<()> {
    to.push_str(&serde_json::to_string(value)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn texts_are_read_back_as_they_were() {
        let long = "x".repeat(1000);
        let texts = ["", "plain", "a\"b", "a\\b", "\u{1b}[2J\n", "\u{7f}é", &long];
        let mut object = "{}".to_owned();
        add_list(&mut object, "texts", &texts, |to, text| add_text(to, text)).expect("JSON");
        add_list(&mut object, "none", &[(); 0], |_, ()| Ok(())).expect("JSON");
        let joined = |other: &str| {
            let mut object = "{\"a\":1}".to_owned();
            join(&mut object, other);
            object
        };
        let object = joined(&object);
        let read: Value = serde_json::from_str(&object).expect("JSON");
        assert_eq!(read, json!({"a": 1, "texts": texts, "none": []}));
        assert_eq!(joined("{}"), "{\"a\":1}");
    }
}
