// SPDX-License-Identifier: Apache-2.0
//! Tests claims on keys of modules that are loaded and unloaded.

use super::*;

/// Checks what a list of the claims that are not made says of a key whose module is loaded again.
#[tokio::test]
async fn claims_on_a_key_whose_module_is_loaded_again_are_told_from_others() {
    let rig = rig();
    let load = || rig.guest.add_module("mod", &[TestKey::new("gamma", 0)]);
    assert_eq!(load(), 0);
    let wanted = [
        ("alpha", Want::On),
        ("beta", Want::On),
        ("mod:gamma", Want::On),
    ];
    rig.set("a", 1, &wanted).await.expect("made");
    let not_made = |page_size| {
        let page = rig.keys.claims(&ClaimQuery {
            page_size,
            name: "a".to_owned(),
            not_made: true,
            ..ClaimQuery::default()
        });
        assert_eq!(page.total, 3);
        let claims = page.claims.into_iter();
        let claims = claims.map(|one| (one.key, one.verdict, one.claim.replaced));
        (claims.collect::<Vec<_>>(), page.next_page_token)
    };
    assert_eq!(not_made(10), (vec![], String::new()));
    assert_eq!(rig.guest.delete_module("mod"), 0);
    let gamma = |verdict, replaced| ("mod:gamma".to_owned(), verdict, replaced);
    let (unloaded, _) = not_made(10);
    assert_eq!(unloaded, [gamma(Verdict::Missing, false)]);
    assert_eq!(load(), 0);
    let (loaded, _) = not_made(10);
    assert_eq!(loaded, [gamma(Verdict::Void, true)]);
    // The guest changes another key, which is on the first page then.
    rig.guest.set_count("alpha", 0);
    let alpha = ("alpha".to_owned(), Verdict::Void, false);
    assert_eq!(not_made(1), (vec![alpha], "beta".to_owned()));
    rig.set("a", 2, &wanted).await.expect("made again");
    assert_eq!(not_made(10), (vec![], String::new()));
}

/// A key whose references are to be returned is unloaded with its module. The void claim on it is
/// not tried again.
#[tokio::test]
async fn a_key_that_is_gone_is_not_returned_later() {
    let rig = rig();
    assert_eq!(rig.guest.add_module("mod", &[TestKey::new("gamma", 1)]), 0);
    for owner in ["a", "b"] {
        let made = rig.set(owner, 1, &[("mod:gamma", Want::Held)]).await;
        made.expect("made");
    }
    assert_eq!(rig.guest.register_again(), 0);
    let outcome = rig.set("a", 2, &[]).await.expect("answered");
    assert_eq!(outcome.keys[0].reason, "MODULE_REFUSED");
    assert_eq!(rig.guest.add_module_again("mod", |_| {}), 0);
    assert_eq!(rig.guest.delete_module("mod"), 0);
    rig.clock.advance(Duration::from_secs(1));
    // The tick is answered once nothing is due.
    rig.keys.tick().await.expect("it runs");
    let listed = rig.listed();
    assert_eq!(listed, [("b".to_owned(), Verdict::Missing, false)]);
}
