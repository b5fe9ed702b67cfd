// SPDX-License-Identifier: Apache-2.0
//! Decides whether a caller's credentials are accepted. The decision is made when the caller's
//! connection opens, at each call, and while a stream is open.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::tls::Tls;
use crate::identity::Identity;
use crate::policy::LivePolicy;

/// The maximum interval between checks of a certificate's expiry. It is bounded, because the wall
/// clock may be set while a stream is open.
const LOOK_INTERVAL: Duration = Duration::from_secs(60);

/// The policy and the CAs in force.
#[derive(Clone)]
pub struct Admission {
    policy: LivePolicy,
    tls: Option<Tls>,
}

/// The reason why a certificate is no longer accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The certificate has expired.
    #[error("the client certificate has expired; connect with a new one")]
    Expired,
    /// The policy lists the certificate as revoked.
    #[error("the policy has revoked the client certificate; connect with another certificate")]
    Revoked,
    /// The CAs were reloaded, and the certificate's CA is not among them.
    #[error(
        "no CA that is trusted for its name has issued the client certificate; connect with a certificate of a trusted CA"
    )]
    Untrusted,
}

impl Admission {
    /// Creates the admission for a policy, which also lists the revoked certificates.
    #[must_use]
    pub fn new(policy: LivePolicy, tls: Option<Tls>) -> Self {
        Self { policy, tls }
    }

    /// Returns the policy.
    #[must_use]
    pub fn policy(&self) -> &LivePolicy {
        &self.policy
    }

    /// Returns whether the host's certificate is valid for this name.
    #[must_use]
    pub fn is_for(&self, name: &str) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.is_for(name))
    }

    /// Checks that the caller's certificate has not expired, is not revoked, and comes from a CA
    /// that is still trusted for its name. A caller on a unix socket has no certificate and is
    /// accepted.
    ///
    /// # Errors
    /// [`Refusal`].
    pub fn check(&self, identity: &Identity) -> Result<(), Refusal> {
        let Some(proof) = &identity.certificate else {
            return Ok(());
        };
        if identity.has_expired(SystemTime::now()) {
            return Err(Refusal::Expired);
        }
        if self.policy.current().has_revoked(&proof.fingerprint) {
            return Err(Refusal::Revoked);
        }
        if self.tls.as_ref().is_some_and(|tls| !tls.trusts(proof)) {
            return Err(Refusal::Untrusted);
        }
        Ok(())
    }

    /// Calls `refused` at once and whenever its result may have changed. This is after a reload of
    /// the policy or of the CAs, when the caller's certificate expires, and at least once a minute.
    /// Returns the first refusal.
    pub async fn until<T>(&self, identity: &Identity, refused: impl Fn() -> Option<T>) -> T {
        let mut policy = self.policy.subscribe();
        let mut cas = self.tls.as_ref().map(Tls::subscribe);
        loop {
            // A reload after this point wakes the `select!` below.
            policy.mark_unchanged();
            if let Some(cas) = &mut cas {
                cas.mark_unchanged();
            }
            if let Some(refusal) = refused() {
                return refusal;
            }
            let other_cas = async {
                match &mut cas {
                    // `self` owns the sender, so this waits for a change.
                    Some(cas) => drop(cas.changed().await),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                _ = policy.changed() => {}
                () = other_cas => {}
                () = tokio::time::sleep(expiry(identity).min(LOOK_INTERVAL)) => {}
            }
        }
    }
}

/// Returns the time until the caller's certificate expires.
fn expiry(identity: &Identity) -> Duration {
    let Some(proof) = &identity.certificate else {
        return Duration::MAX;
    };
    // A certificate is valid through its last second.
    let end = u64::try_from(proof.not_after.saturating_add(1)).unwrap_or(0);
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    Duration::from_secs(end).saturating_sub(now.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::identity::Proof;

    fn expires_in(seconds: i64) -> Identity {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).expect("after");
        let proof = Proof {
            fingerprint: "ab".repeat(32),
            not_after: i64::try_from(now.as_secs()).expect("small") + seconds,
            chain: vec![],
            generation: 0,
        };
        Identity {
            principal: "alice".to_owned(),
            certificate: Some(proof),
        }
    }

    #[tokio::test]
    async fn the_end_of_a_certificate_is_awaited() {
        let admission = Admission::new(LivePolicy::own_user_only(0), None);
        let identity = expires_in(0);
        assert_eq!(admission.check(&identity), Ok(()));
        let refused = || admission.check(&identity).err();
        assert_eq!(admission.until(&identity, refused).await, Refusal::Expired);
        assert_eq!(admission.check(&Identity::of_uid(7)), Ok(()));
    }

    #[tokio::test]
    async fn a_policy_that_is_read_again_is_asked_at_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("policy.yaml");
        let rules = "rules: [{name: a, principals: [alice], role: viewer}]";
        std::fs::write(&file, rules).expect("written");
        let policy = LivePolicy::read(file.clone()).expect("good");
        let admission = Admission::new(policy.clone(), None);
        let identity = expires_in(3600);
        let asked = Arc::new(AtomicBool::new(false));
        let waiting = tokio::spawn({
            let (admission, identity, asked) = (admission.clone(), identity.clone(), asked.clone());
            async move {
                let refused = || {
                    asked.store(true, Ordering::Release);
                    admission.check(&identity).err()
                };
                admission.until(&identity, refused).await
            }
        });
        while !asked.load(Ordering::Acquire) {
            tokio::task::yield_now().await;
        }
        let revoked = format!("{rules}\nrevoked_certificates: ['{}']", "ab".repeat(32));
        std::fs::write(&file, revoked).expect("written");
        policy.reload().expect("good");
        assert_eq!(waiting.await.expect("ended"), Refusal::Revoked);
    }
}
