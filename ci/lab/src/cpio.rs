// SPDX-License-Identifier: Apache-2.0
//! Writes cpio archives in the "newc" format of the initramfs (kernel:
//! Documentation/driver-api/early-userspace/buffer-format.rst).

const REGULAR: u32 = 0o100_000;
const DIRECTORY: u32 = 0o040_000;
const SYMLINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// An archive under construction. Every file belongs to root and has time stamp zero, so that equal
/// content gives equal bytes.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    /// Adds a directory; its parents must have been added before.
    pub fn directory(&mut self, path: &str) {
        self.entry(path, DIRECTORY | 0o755, (0, 0), &[]);
    }

    /// Adds a file; `permissions` are the low nine mode bits.
    pub fn file(&mut self, path: &str, permissions: u32, content: &[u8]) {
        self.entry(path, REGULAR | permissions, (0, 0), content);
    }

    /// Adds a symbolic link that points to `target`.
    pub fn symlink(&mut self, path: &str, target: &str) {
        self.entry(path, SYMLINK | 0o777, (0, 0), target.as_bytes());
    }

    /// Adds a character device node.
    pub fn character_device(&mut self, path: &str, major: u32, minor: u32) {
        self.entry(path, CHARACTER_DEVICE | 0o600, (major, minor), &[]);
    }

    /// Finishes the archive. Linux accepts several archives in sequence.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes.resize(self.bytes.len().next_multiple_of(512), 0);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        let path = path.trim_start_matches('/');
        let size = u32::try_from(content.len()).expect("an initramfs file is far below 4 GiB");
        let name_size = u32::try_from(path.len() + 1).expect("a path is short");
        self.entries += 1;
        let fields = [
            self.entries, // inode
            mode,
            0, // uid
            0, // gid
            1, // links
            0, // mtime
            size,
            0, // major and minor of the containing device
            0,
            device.0,
            device.1,
            name_size,
            0, // checksum, unused in this format
        ];
        self.bytes.extend_from_slice(b"070701");
        for field in fields {
            self.bytes
                .extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The path, mode, device and content.
    type Entry = (String, u32, (u32, u32), Vec<u8>);

    /// Parses the archive by the rules of the format.
    fn read(bytes: &[u8]) -> Vec<Entry> {
        let mut found = Vec::new();
        let mut at = 0;
        loop {
            let header = &bytes[at..at + 110];
            assert_eq!(&header[..6], b"070701");
            let field = |n: usize| {
                let text = std::str::from_utf8(&header[6 + 8 * n..14 + 8 * n]).unwrap();
                u32::from_str_radix(text, 16).unwrap()
            };
            let name_end = at + 110 + field(11) as usize;
            assert_eq!(bytes[name_end - 1], 0);
            let name = String::from_utf8(bytes[at + 110..name_end - 1].to_vec()).unwrap();
            let content = name_end.next_multiple_of(4);
            let content_end = content + field(6) as usize;
            if name == "TRAILER!!!" {
                return found;
            }
            let device = (field(9), field(10));
            found.push((name, field(1), device, bytes[content..content_end].to_vec()));
            at = content_end.next_multiple_of(4);
        }
    }

    #[test]
    fn what_is_written_reads_back() {
        let mut archive = Archive::default();
        archive.directory("/dev");
        archive.character_device("dev/console", 5, 1);
        for length in 0..6 {
            archive.file(&format!("f{length}"), 0o755, &vec![b'x'; length]);
        }
        archive.symlink("bin", "usr/bin");
        let bytes = archive.finish();
        assert_eq!(bytes.len() % 512, 0);
        let entries = read(&bytes);
        assert_eq!(entries[0], ("dev".into(), 0o040_755, (0, 0), vec![]));
        assert_eq!(
            entries[1],
            ("dev/console".into(), 0o020_600, (5, 1), vec![])
        );
        for length in 0..6 {
            let name = format!("f{length}");
            assert_eq!(
                entries[2 + length],
                (name, 0o100_755, (0, 0), vec![b'x'; length])
            );
        }
        assert_eq!(
            entries[8],
            ("bin".into(), 0o120_777, (0, 0), b"usr/bin".to_vec())
        );
    }
}
