// SPDX-License-Identifier: Apache-2.0

use patchbay_proto::v1;

use super::lab::{Commands, Host};

fn host() -> Host {
    let host = Host::with(&["only"]);
    let hold = |id: &str, key: &str, holder: &str| v1::Hold {
        id: id.to_owned(),
        key: key.to_owned(),
        holder: holder.to_owned(),
        references: 1,
        ..Default::default()
    };
    host.fake.guest("only", |guest| {
        guest.holds = vec![
            hold("h1", "alpha", "uid:0"),
            hold("h2", "beta", "uid:7"),
            hold("h3", "net:gamma", "uid:0"),
        ];
    });
    host
}

#[test]
fn holds_are_listed_page_by_page() {
    let host = host();
    let table = host.ok(&["holds", "list"]);
    assert!(table.starts_with("ID  KEY"), "{table}");
    assert_eq!(table.lines().count(), 4, "{table}");
    assert!(table.contains("never"), "{table}");
    assert_eq!(host.ok(&["holds", "list", "-o", "name"]), "h1\nh2\nh3\n");
    let of = ["holds", "list", "--holder", "uid:7", "-o", "name", "b*"];
    assert_eq!(host.ok(&of), "h2\n");
    assert_eq!(host.fake.seen("patterns: [\"b*\"]").len(), 1);
}

#[test]
fn holds_are_released_and_renewed_by_their_ids() {
    let host = host();
    let text = host.ok(&["holds", "release", "h1", "h3"]);
    assert!(
        text.contains("alpha") && text.contains("net:gamma"),
        "{text}"
    );
    let message = host.fails(1, &["holds", "release", "h2"]);
    assert!(message.contains("--force"), "{message}");
    let renewed = host.json(&["holds", "renew", "h2", "--ttl", "10m"]);
    assert_eq!(renewed[0]["expires_at"], "1970-01-01T00:10:00Z");
    let renewed = host.json(&["holds", "renew", "h2", "--no-expiry"]);
    assert!(renewed[0]["expires_at"].is_null());
    let output = host.fed(&["holds", "release", "--force", "-"], "h2\n");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let message = host.fails(1, &["holds", "release", "h2"]);
    assert!(message.contains("patchbay holds list"), "{message}");
    for usage in [
        &["holds"][..],
        &["holds", "release"],
        &["holds", "renew", "h2"],
        &["holds", "renew", "h2", "--ttl", "1m", "--no-expiry"],
        &["holds", "renew", "--ttl", "1m"],
        &["holds", "list", "--holder"],
    ] {
        assert_eq!(host.run(usage).status.code(), Some(2), "{usage:?}");
    }
}
