//! Attention of one device to traded heads.

use super::element::ContextElement;
use super::head_group::Group;
use crate::Runtime;
use crate::attention::{Attention, AttentionBackward, AttentionConfig, Order};
use crate::runtime::Result;

/// Attention to groups of so many key heads.
pub(super) struct Alone<T: ContextElement> {
    key_heads: u64,
    pub forward: Attention<T>,
    pub backward: AttentionBackward<T>,
}

impl<T: ContextElement> Alone<T> {
    /// `made`, and that of groups of `key_heads` of a rank's heads, `all`, if it was not made yet. Its gradients are added as those of `as_whole`, if given, in memory that
    /// `sharing` gives to all.
    pub fn with(
        mut made: Vec<Self>,
        runtime: &Runtime,
        all: &AttentionConfig,
        key_heads: u64,
        as_whole: Option<&AttentionConfig>,
        sharing: impl Fn(AttentionBackward<T>) -> AttentionBackward<T>,
    ) -> Result<Vec<Self>> {
        if made.iter().all(|other| other.key_heads != key_heads) {
            let traded = AttentionConfig { heads: all.heads / all.key_heads * key_heads, key_heads, ..*all };
            let backward = AttentionBackward::new_as(runtime, traded, Order::Deterministic, as_whole.unwrap_or(&traded))?;
            made.push(Self { key_heads, forward: Attention::new(runtime, traded)?, backward: sharing(backward) });
        }
        Ok(made)
    }

    /// That of a group.
    pub fn of<'a>(alone: &'a [Self], group: &Group<T>) -> &'a Self {
        let found = alone.iter().find(|alone| alone.key_heads == group.key_heads);
        found.unwrap_or_else(|| unreachable!("the attention of each group was loaded"))
    }
}
