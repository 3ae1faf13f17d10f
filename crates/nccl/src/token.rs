//! The secret that the ranks of a world share.

use std::fmt;

use hmac::{Hmac, Mac};
use sha2::Sha256;

/// Bytes of a code of [`Token::code`].
pub(crate) const CODE: usize = 32;

/// Proves that a process belongs to the world. It never travels: each side sends a code over random
/// numbers of both.
#[derive(Clone)]
pub struct Token(Vec<u8>);

impl Token {
    /// Fewest bytes of a token.
    pub const SHORTEST: usize = 16;

    /// A token, at least [`SHORTEST`](Self::SHORTEST) bytes long.
    pub fn new(secret: impl Into<Vec<u8>>) -> Option<Self> {
        Some(secret.into())
            .filter(|secret| secret.len() >= Self::SHORTEST)
            .map(Self)
    }

    pub(crate) fn code(&self, parts: &[&[u8]]) -> [u8; CODE] {
        self.mac(parts).finalize().into_bytes().into()
    }

    /// Compared in constant time.
    pub(crate) fn verify(&self, parts: &[&[u8]], code: &[u8]) -> bool {
        self.mac(parts).verify_slice(code).is_ok()
    }

    fn mac(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.0).expect("any length of key will do");
        parts.iter().for_each(|part| mac.update(part));
        mac
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}
