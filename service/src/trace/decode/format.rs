// SPDX-License-Identifier: Apache-2.0
//! `events/SYSTEM/NAME/format` files (`Documentation/trace/events.rst`, "Event formats").

/// Limits that are above those of any event of Linux.
const MAX_FIELDS: usize = 128;
const MAX_NAME_BYTES: usize = 128;
/// Limit on the total length of all names in bytes.
const MAX_NAMES_BYTES: usize = 4096;
/// Maximum size of an event: no event is larger than a page.
const MAX_EVENT_BYTES: usize = 4096;
/// Offsets of the common fields (`struct trace_entry`).
const COMMON: [(&str, usize, usize); 4] = [
    ("common_type", 0, 2),
    ("common_flags", 2, 1),
    ("common_preempt_count", 3, 1),
    ("common_pid", 4, 4),
];

/// The reason why a format file cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// A malformed line.
    #[error("the event's format has a line that cannot be understood: {0:?}")]
    Line(String),
    /// A common field is missing or at another offset.
    #[error("the event's format has no {0} where it belongs")]
    Missing(&'static str),
    /// Too many fields.
    #[error("the event's format has more than {MAX_FIELDS} fields")]
    TooManyFields,
    /// The names are too long.
    #[error("the names of the event's fields are longer than {MAX_NAMES_BYTES} bytes together")]
    LongNames,
}

/// Layout of an event in the ring buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Format {
    /// `common_type` of its events.
    pub id: u16,
    /// Fields, without the common ones.
    pub fields: Box<[Field]>,
}

/// One field.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field {
    pub name: Box<str>,
    pub kind: Kind,
    /// Offset in the event, in bytes.
    pub offset: usize,
    /// Size in bytes.
    pub size: usize,
}

/// Type of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Signed,
    Unsigned,
    /// The kernel prints the value in hexadecimal.
    Hexadecimal,
    /// `char NAME[N]`.
    Text,
    /// `__data_loc`: length and offset of the value, 16 bits each.
    Located {
        text: bool,
    },
    /// `__rel_loc`: like `Located`, but the offset is counted from the field's end.
    RelativelyLocated {
        text: bool,
    },
    /// Arrays and structures, as raw bytes.
    Raw,
}

impl Format {
    /// Returns the memory used by the format, in bytes.
    pub fn bytes(&self) -> usize {
        let field = |field: &Field| size_of::<Field>() + field.name.len();
        size_of::<Self>() + self.fields.iter().map(field).sum::<usize>()
    }

    /// Parses a format file.
    ///
    /// # Errors
    /// [`FormatError`].
    pub fn parse(text: &str) -> Result<Self, FormatError> {
        let id = text
            .lines()
            .find_map(|line| line.strip_prefix("ID:"))
            .and_then(|id| id.trim().parse().ok());
        let id = id.ok_or(FormatError::Missing("ID"))?;
        let mut fields = Vec::new();
        for line in text
            .lines()
            .map(str::trim)
            .filter(|line| line.starts_with("field:"))
        {
            fields.push(
                parse_field(line)
                    .ok_or_else(|| FormatError::Line(line.chars().take(200).collect()))?,
            );
            if fields.len() > MAX_FIELDS {
                return Err(FormatError::TooManyFields);
            }
        }
        if fields.iter().map(|field| field.name.len()).sum::<usize>() > MAX_NAMES_BYTES {
            return Err(FormatError::LongNames);
        }
        for (name, offset, size) in COMMON {
            let found = fields.iter().find(|field: &&Field| *field.name == *name);
            if found.is_none_or(|field| (field.offset, field.size) != (offset, size)) {
                return Err(FormatError::Missing(name));
            }
        }
        fields.retain(|field| !field.name.starts_with("common_"));
        let print = text
            .lines()
            .find_map(|line| line.strip_prefix("print fmt: "))
            .unwrap_or_default();
        for name in hexadecimal_arguments(print) {
            if let Some(field) = fields.iter_mut().find(|field| *field.name == *name)
                && matches!(field.kind, Kind::Signed | Kind::Unsigned)
            {
                field.kind = Kind::Hexadecimal;
            }
        }
        let fields = fields.into_boxed_slice();
        Ok(Self { id, fields })
    }
}

/// Parses "field:TYPE NAME[N];\toffset:O;\tsize:S;\tsigned:X;".
fn parse_field(line: &str) -> Option<Field> {
    let mut parts = line.split(';').map(str::trim);
    let declaration = parts.next()?.strip_prefix("field:")?;
    let mut number = |name: &str| {
        parts
            .next()?
            .strip_prefix(name)?
            .strip_prefix(':')?
            .parse::<usize>()
            .ok()
    };
    let (offset, size, signed) = (
        number("offset")?,
        number("size")?,
        number("signed").unwrap_or(0),
    );
    let (kind, name) = declaration.rsplit_once(' ')?;
    let (name, array) = match name.split_once('[') {
        Some((name, _)) => (name, true),
        None => (name, false),
    };
    let fits = !name.is_empty()
        && name.len() <= MAX_NAME_BYTES
        && offset.checked_add(size)? <= MAX_EVENT_BYTES;
    if !fits {
        return None;
    }
    // "unsigned char" and "__u8" are numbers, not text.
    let text = kind.contains("char") && !kind.contains("unsigned char") && !kind.contains('*');
    let kind = if kind.starts_with("__data_loc") && size == 4 {
        Kind::Located { text }
    } else if kind.starts_with("__rel_loc") && size == 4 {
        Kind::RelativelyLocated { text }
    } else if array {
        if text { Kind::Text } else { Kind::Raw }
    } else if !matches!(size, 1 | 2 | 4 | 8) {
        Kind::Raw
    } else if kind.contains('*') {
        Kind::Hexadecimal
    } else if signed == 1 {
        Kind::Signed
    } else {
        Kind::Unsigned
    };
    Some(Field {
        name: name.into(),
        kind,
        offset,
        size,
    })
}

/// Returns the fields that the kernel prints in hexadecimal: arguments that are a plain field
/// (`REC->name`, with casts and parentheses) and whose conversion is %x or %p.
fn hexadecimal_arguments(print: &str) -> Vec<&str> {
    let Some((format, arguments)) = print
        .strip_prefix('"')
        .and_then(|rest| rest.split_once('"'))
    else {
        return vec![];
    };
    let arguments = split_arguments(arguments.trim_start_matches(','));
    conversions(format)
        .into_iter()
        .zip(arguments)
        .filter(|(conversion, _)| matches!(conversion, 'x' | 'X' | 'p'))
        .filter_map(|(_, argument)| {
            let (casts, name) = argument.rsplit_once("REC->")?;
            let name = name.trim_end_matches([')', ' ']);
            let is_name = name
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
            let plain = casts
                .bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b"_() *".contains(&byte));
            (is_name && plain).then_some(name)
        })
        .collect()
}

/// Returns the conversion characters of a printf() format, in order.
fn conversions(format: &str) -> Vec<char> {
    let mut letters = Vec::new();
    let mut rest = format.chars().peekable();
    while let Some(letter) = rest.next() {
        if letter != '%' {
            continue;
        }
        while rest
            .next_if(|c| c.is_ascii_digit() || "-+ #.lhzjtq*".contains(*c))
            .is_some()
        {}
        match rest.next() {
            Some('%') | None => {}
            Some(conversion) => letters.push(conversion),
        }
    }
    letters
}

/// Splits at commas outside parentheses and quotes.
fn split_arguments(text: &str) -> Vec<&str> {
    let mut arguments = Vec::new();
    let (mut depth, mut quoted, mut start) = (0i32, false, 0);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'"' => quoted = !quoted,
            _ if quoted => {}
            b'(' | b'{' | b'[' => depth += 1,
            b')' | b'}' | b']' => depth -= 1,
            b',' if depth == 0 => {
                arguments.push(text[start..at].trim());
                start = at + 1;
            }
            _ => {}
        }
    }
    arguments.push(text[start..].trim());
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    const SWITCH: &str = include_str!("../fixtures/sched_switch.format");
    const EXEC: &str = include_str!("../fixtures/sched_process_exec.format");
    const TIMER: &str = include_str!("../fixtures/timer_start.format");
    const OPENAT: &str = include_str!("../fixtures/sys_enter_openat.format");

    fn kinds(text: &str) -> Vec<(String, Kind)> {
        let format = Format::parse(text).expect("of a real kernel");
        format
            .fields
            .into_iter()
            .map(|field| (field.name.to_string(), field.kind))
            .collect()
    }

    #[test]
    fn formats_of_a_real_kernel() {
        let switch = Format::parse(SWITCH).expect("sched_switch");
        assert_eq!(switch.fields.len(), 7);
        let prev_state = Field {
            name: "prev_state".into(),
            kind: Kind::Signed,
            offset: 32,
            size: 8,
        };
        assert_eq!(switch.fields[3], prev_state);
        assert_eq!(kinds(SWITCH)[0], ("prev_comm".into(), Kind::Text));
        assert_eq!(
            kinds(EXEC)[0],
            ("filename".into(), Kind::Located { text: true })
        );
        assert_eq!(kinds(TIMER)[1], ("function".into(), Kind::Hexadecimal));
        assert_eq!(kinds(TIMER)[2], ("expires".into(), Kind::Unsigned));
        assert_eq!(
            kinds(OPENAT)[3],
            ("flags".into(), Kind::Hexadecimal),
            "printed by %08lx"
        );
    }

    #[test]
    fn arrays_of_numbers_are_not_text() {
        let field = |text| parse_field(text).expect("a field").kind;
        assert_eq!(
            field("field:unsigned char mac[6];\toffset:8;\tsize:6;\tsigned:0;"),
            Kind::Raw
        );
        assert_eq!(
            field("field:__rel_loc char[] s;\toffset:8;\tsize:4;\tsigned:0;"),
            Kind::RelativelyLocated { text: true }
        );
        assert_eq!(
            field("field:__data_loc u8[] d;\toffset:8;\tsize:4;\tsigned:0;"),
            Kind::Located { text: false }
        );
        assert_eq!(
            field("field:struct x y;\toffset:8;\tsize:12;\tsigned:0;"),
            Kind::Raw
        );
    }

    #[test]
    fn malformed_formats_are_refused() {
        let broken = SWITCH.replace("offset:8", "offset:x");
        assert!(matches!(Format::parse(&broken), Err(FormatError::Line(_))));
        let far = SWITCH.replace("offset:60", "offset:4093");
        assert!(matches!(Format::parse(&far), Err(FormatError::Line(_))));
        let huge = SWITCH.replace("offset:60", "offset:18446744073709551615");
        assert!(matches!(Format::parse(&huge), Err(FormatError::Line(_))));
        let moved = SWITCH.replace("common_pid;\toffset:4", "common_pid;\toffset:12");
        assert_eq!(
            Format::parse(&moved),
            Err(FormatError::Missing("common_pid"))
        );
        assert_eq!(
            Format::parse("ID: 70000\n"),
            Err(FormatError::Missing("ID"))
        );
        let many = format!(
            "{SWITCH}{}",
            "\tfield:int x;\toffset:8;\tsize:4;\tsigned:1;\n".repeat(300)
        );
        assert_eq!(Format::parse(&many), Err(FormatError::TooManyFields));
    }
}
