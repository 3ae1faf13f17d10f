//! A JSON file that says what it is and knows whether it was changed.
//!
//! ```text
//! { "format": ..., "version": 1, "crc32": checksum of the text of contents, "contents": { ... } }
//! ```

use crate::CheckpointError;
use crate::storage::{NewFile, Storage};
use moe_lora_files::{FileError, regular_file_len};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Serializer;
use serde_json::ser::{Formatter, PrettyFormatter};
use serde_json::value::RawValue;
use std::io::{self, Write};
use std::path::Path;

const VERSION: u64 = 1;
/// The manifest of a terabyte takes 40 MB.
const MAX_BYTES: u64 = 256 << 20;

/// The fields that every version has.
#[derive(Deserialize)]
struct Head {
    format: String,
    version: u64,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    format: String,
    version: u64,
    crc32: String,
    contents: Box<RawValue>,
}

pub(crate) fn read<T: DeserializeOwned>(
    path: &Path,
    format: &'static str,
) -> Result<T, CheckpointError> {
    let bytes = regular_file_len(path)?;
    if bytes > MAX_BYTES {
        return Err(CheckpointError::DocumentTooLarge {
            path: path.to_owned(),
            bytes,
            limit: MAX_BYTES,
        });
    }
    let text = std::fs::read(path).map_err(FileError::io("read", path))?;
    let fault = |source| CheckpointError::Document {
        path: path.to_owned(),
        format,
        source,
    };
    let head: Head = serde_json::from_slice(&text).map_err(fault)?;
    if head.format != format {
        return Err(CheckpointError::Format {
            path: path.to_owned(),
            found: head.format,
            expected: format,
        });
    }
    if head.version != VERSION {
        return Err(CheckpointError::Version {
            path: path.to_owned(),
            version: head.version,
            supported: VERSION,
        });
    }
    let document: Document = serde_json::from_slice(&text).map_err(fault)?;
    let contents = document.contents.get();
    let found = crc32fast::hash(contents.as_bytes());
    if document.crc32 != format!("{found:08x}") {
        return Err(CheckpointError::DocumentChecksum {
            path: path.to_owned(),
            found,
            declared: document.crc32,
        });
    }
    serde_json::from_str(contents).map_err(fault)
}

pub(crate) fn write<T: Serialize>(
    storage: &dyn Storage,
    path: &Path,
    format: &'static str,
    contents: &T,
) -> Result<(), CheckpointError> {
    let fault = |source| CheckpointError::Document {
        path: path.to_owned(),
        format,
        source,
    };
    let text = text(format, contents).map_err(fault)?;
    let mut file = NewFile::create(storage, path.to_owned())?;
    file.append(text.as_bytes())?;
    Ok(file.finish()?)
}

/// The text of a document.
fn text<T: Serialize>(format: &str, contents: &T) -> serde_json::Result<String> {
    // Strings hold no raw line breaks in JSON, so that this only indents.
    let contents = pretty(contents)?.replace('\n', "\n  ");
    let document = Document {
        format: format.to_owned(),
        version: VERSION,
        crc32: format!("{:08x}", crc32fast::hash(contents.as_bytes())),
        contents: RawValue::from_string(contents)?,
    };
    Ok(pretty(&document)? + "\n")
}

fn pretty<T: Serialize>(value: &T) -> serde_json::Result<String> {
    let mut text = Vec::new();
    let formatter = ArraysInLine(PrettyFormatter::new());
    value.serialize(&mut Serializer::with_formatter(&mut text, formatter))?;
    Ok(String::from_utf8(text).expect("the serializer writes UTF-8"))
}

/// Objects one field a line, arrays in the line: a shape is read at a glance.
struct ArraysInLine(PrettyFormatter<'static>);

impl Formatter for ArraysInLine {
    fn begin_array_value<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        out.write_all(if first { b"" } else { b", " })
    }

    fn begin_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.0.begin_object(out)
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.0.begin_object_key(out, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.0.begin_object_value(out)
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.0.end_object_value(out)
    }

    fn end_object<W: ?Sized + Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.0.end_object(out)
    }
}
