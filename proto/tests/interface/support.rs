// SPDX-License-Identifier: Apache-2.0
//! Compiles .proto files to descriptors.

use std::path::{Path, PathBuf};

use prost_types::{
    DescriptorProto, EnumDescriptorProto, FieldDescriptorProto, FileDescriptorProto,
    FileDescriptorSet,
};

/// The folder that imports are relative to.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Every .proto file of the interfaces, so that none is left out.
pub fn interfaces() -> FileDescriptorSet {
    compile(root(), &files(&root().join("patchbay")))
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).expect("a folder");
    let mut found = vec![];
    for path in entries.map(|entry| entry.expect("an entry").path()) {
        if path.is_dir() {
            found.extend(files(&path));
        } else if path
            .extension()
            .is_some_and(|extension| extension == "proto")
        {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// The only file of the test, which need not exist outside it.
pub fn compile_text(path: &str, text: &str) -> FileDescriptorSet {
    let folder = tempfile::tempdir().expect("temporary folder");
    let file = folder.path().join(path);
    std::fs::create_dir_all(file.parent().expect("a folder")).expect("writable");
    std::fs::write(&file, text).expect("writable");
    compile(folder.path(), &[file])
}

fn compile(root: &Path, files: &[PathBuf]) -> FileDescriptorSet {
    protox::compile(files, [root]).unwrap_or_else(|error| panic!("{error:?}"))
}

/// Our own files, without what they import.
pub fn own(set: &FileDescriptorSet) -> impl Iterator<Item = &FileDescriptorProto> {
    set.file
        .iter()
        .filter(|file| !file.name().starts_with("google/"))
}

/// Every message of the file with its full name, nested messages after their parents. Entries of
/// maps are left out, because they are generated.
pub fn messages(file: &FileDescriptorProto) -> Vec<(String, &DescriptorProto)> {
    fn collect<'f>(
        scope: &str,
        messages: &'f [DescriptorProto],
        found: &mut Vec<(String, &'f DescriptorProto)>,
    ) {
        for message in messages {
            if message
                .options
                .as_ref()
                .is_some_and(|options| options.map_entry())
            {
                continue;
            }
            let name = format!("{scope}.{}", message.name());
            found.push((name.clone(), message));
            collect(&name, &message.nested_type, found);
        }
    }
    let mut found = vec![];
    collect(file.package(), &file.message_type, &mut found);
    found
}

/// Every enum of the file with its full name.
pub fn enums(file: &FileDescriptorProto) -> Vec<(String, &EnumDescriptorProto)> {
    let named = |scope: &str, of: &EnumDescriptorProto| format!("{scope}.{}", of.name());
    let top = file
        .enum_type
        .iter()
        .map(|of| (named(file.package(), of), of));
    let messages = messages(file);
    let nested = messages.into_iter().flat_map(|(scope, message)| {
        let enums = message.enum_type.iter();
        enums.map(|of| (named(&scope, of), of)).collect::<Vec<_>>()
    });
    top.chain(nested).collect()
}

/// The type as the file spells it, the name of a message or enum in full.
pub fn type_of(message: &DescriptorProto, field: &FieldDescriptorProto) -> String {
    use prost_types::field_descriptor_proto::{Label, Type};
    let nested = field.type_name().rsplit('.').next().unwrap_or_default();
    let entry = message.nested_type.iter().find(|entry| {
        entry.name() == nested
            && entry
                .options
                .as_ref()
                .is_some_and(|options| options.map_entry())
    });
    if let Some(entry) = entry {
        let of = |index: usize| type_of(entry, &entry.field[index]);
        return format!("map<{}, {}>", of(0), of(1));
    }
    let name = match field.r#type() {
        Type::Message | Type::Enum => field.type_name().trim_start_matches('.').to_owned(),
        scalar => scalar
            .as_str_name()
            .trim_start_matches("TYPE_")
            .to_lowercase(),
    };
    let label = match field.label() {
        Label::Repeated => "repeated ".to_owned(),
        _ if field.proto3_optional() => "optional ".to_owned(),
        _ => match field
            .oneof_index
            .and_then(|index| usize::try_from(index).ok())
        {
            Some(index) => format!("oneof {} ", message.oneof_decl[index].name()),
            None => String::new(),
        },
    };
    format!("{label}{name}")
}
