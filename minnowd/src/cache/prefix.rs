//! The prefix cache: a radix tree over the tokens of committed blocks, on top of the pages.
//!
//! A node is one committed block: exactly 32 token ids below the node of the block before it, and the page with their
//! K/V. It is found by a hash, but taken only if all 32 ids are equal, and so are those of all blocks before it. A
//! sequence holds the pages of all its blocks, so whoever holds a node holds its ancestors too; a node that no
//! sequence holds is *idle*. When pages run out, the idle leaf whose last holder left first makes room.
//!
//! Always true, and checked by [`PrefixCache::check`]:
//! - free pages and held pages add up to the pool; a page has one holder for its node and one for each sequence on it;
//! - every node has a committed page of its own and, unless it is a first block, a parent;
//! - what a sequence holds is never evicted, and descendants of an idle node are idle;
//! - a node that is not held was never used later than its parent.
//!
//! Every call costs the sequence's number of blocks at most, plus the logarithm of the number of idle leaves for each
//! page that is taken or given back. No call looks at all nodes but [`PrefixCache::warmest`], [`PrefixCache::clear`]
//! and the check.

use std::collections::{BTreeSet, HashMap};

use minnow_common::BLOCK;
use thiserror::Error;

use super::pool::{PageId, PagePool};

/// Token ids of one block.
pub type BlockTokens = [u32; BLOCK];

/// All pages, and what is known of the committed ones.
#[derive(Debug)]
pub struct PrefixCache {
    pool: PagePool,
    /// The node on each page, by the page's number; a node is named by its page.
    nodes: Vec<Option<Node>>,
    edges: HashMap<Edge, PageId>,
    /// Idle nodes without children, with [`Node::last_used`]: the first one is evicted next.
    idle_leaves: BTreeSet<(i64, PageId)>,
    idle: usize,
    /// Counts releases; the time of [`Node::last_used`].
    now: i64,
    /// Counts downwards for restored blocks: each is colder than those before it and than everything used here.
    coldest: i64,
    stats: CacheStats,
}

/// A request's share of the pages: those of its blocks, in order, the ones being written included.
///
/// Made by [`PrefixCache::begin`] and [`PrefixCache::fork`], ended by [`PrefixCache::release`]; dropping it otherwise
/// leaks its pages.
#[derive(Debug)]
#[must_use = "a sequence holds pages until it is released"]
pub struct Sequence {
    pages: Vec<PageId>,
    /// Blocks at the front that are final.
    committed: usize,
    /// Blocks at the front that are nodes of the tree; fewer than `committed` once one was kept out of it.
    in_tree: usize,
    reused: usize,
    access: Access,
}

/// Whether a sequence uses the tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Finds blocks of others, and offers its own.
    Shared,
    /// Neither reads nor writes the tree (`cache_prompt: false`): only forks and followers see its pages.
    Private,
}

/// How much of a prompt is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Blocks that [`PrefixCache::begin`] would find.
    pub blocks: usize,
    /// Those of them that are idle: taking them makes [`PrefixCache::available`] this much smaller.
    pub idle: usize,
}

/// What became of a committed block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Commit {
    /// It is a new node, and others may find it.
    Inserted,
    /// The tree had it: the sequence uses the page from there now, and its own is free.
    Known,
    /// It stays with the sequence: its access is private, or a block before it was kept out of the tree.
    Private,
}

/// What became of a block that [`PrefixCache::restore`] was to bring back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restored {
    /// It is an idle node now.
    Inserted,
    /// The tree had it already.
    Known,
    /// The block before it is not in the tree.
    NoParent,
    /// No page is free; nothing is evicted for what may never be used again.
    NoRoom,
}

/// Neither free pages nor evictable ones suffice; nothing was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("{wanted} more pages are needed, but of {count} only {free} are free and {evictable} can be evicted")]
pub struct NoRoom {
    /// Pages asked for.
    pub wanted: usize,
    /// Pages free.
    pub free: usize,
    /// Pages of blocks that no sequence holds.
    pub evictable: usize,
    /// Pages in all.
    pub count: usize,
}

/// A block of the tree, for whoever writes it down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedBlock {
    /// Its page.
    pub page: PageId,
    /// The page of the block before it; `None` for a first block.
    pub parent: Option<PageId>,
    /// Its tokens.
    pub tokens: BlockTokens,
}

/// What has happened since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    /// Sequences that looked for a prefix.
    pub lookups: u64,
    /// Those of them that found at least one block, at once or later.
    pub hits: u64,
    /// Tokens they did not have to compute.
    pub hit_tokens: u64,
    /// Blocks that became nodes.
    pub inserted: u64,
    /// Committed blocks that the tree had already: computed twice.
    pub duplicates: u64,
    /// Blocks brought back by [`PrefixCache::restore`].
    pub restored: u64,
    /// Nodes that made room.
    pub evicted: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Edge {
    parent: Option<PageId>,
    tokens: BlockTokens,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    edge: Edge,
    /// Index of the block in its sequence.
    depth: usize,
    children: usize,
    /// When a sequence last let go of it; negative for a restored block that none has used yet.
    last_used: i64,
}

impl PrefixCache {
    /// A cache of `page_count` free pages and an empty tree.
    #[must_use]
    pub fn new(page_count: usize) -> Self {
        let pool = PagePool::new(page_count);
        Self {
            nodes: vec![None; pool.count()],
            pool,
            edges: HashMap::new(),
            idle_leaves: BTreeSet::new(),
            idle: 0,
            now: 0,
            coldest: 0,
            stats: CacheStats::default(),
        }
    }

    /// Pages in all.
    #[must_use]
    pub fn page_count(&self) -> usize {
        self.pool.count()
    }

    /// Pages that hold nothing.
    #[must_use]
    pub fn free_count(&self) -> usize {
        self.pool.free_count()
    }

    /// Pages that some sequence holds: in use. Zero when no request runs.
    #[must_use]
    pub fn used_count(&self) -> usize {
        self.page_count() - self.free_count() - self.idle
    }

    /// Blocks in the tree, held or idle.
    #[must_use]
    pub fn cached_count(&self) -> usize {
        self.edges.len()
    }

    /// Blocks in the tree that no sequence holds.
    #[must_use]
    pub fn idle_count(&self) -> usize {
        self.idle
    }

    /// Pages that can be had now: free ones, and those of idle blocks.
    #[must_use]
    pub fn available(&self) -> usize {
        self.free_count() + self.idle
    }

    /// What has happened so far.
    #[must_use]
    pub fn stats(&self) -> CacheStats {
        self.stats
    }

    /// How many whole blocks of `tokens` a shared sequence would find. Changes nothing, not even the order of eviction.
    #[must_use]
    pub fn find(&self, tokens: &[u32]) -> Found {
        let mut found = Found::default();
        for page in self.known(None, tokens) {
            found.blocks += 1;
            found.idle += usize::from(self.is_idle(page));
        }
        found
    }

    /// Whether a sequence that begins with `found` could grow to `blocks` blocks in all now.
    #[must_use]
    pub fn fits(&self, found: Found, blocks: usize) -> bool {
        blocks.saturating_sub(found.blocks) <= self.available().saturating_sub(found.idle)
    }

    /// Begins a sequence with the longest chain of known blocks that `tokens` starts with; a last partial block is
    /// never looked at. The caller passes what may be reused: not, say, a block that is still to be refined.
    pub fn begin(&mut self, tokens: &[u32], access: Access) -> Sequence {
        let mut sequence = Sequence { pages: Vec::new(), committed: 0, in_tree: 0, reused: 0, access };
        self.stats.lookups += u64::from(access == Access::Shared);
        self.extend(&mut sequence, tokens);
        sequence
    }

    /// Takes further known blocks: `tokens` is what follows the committed blocks of `sequence`. Returns their number.
    /// Between two chunks of a prefill this finds what another sequence has computed meanwhile. Pages reserved for
    /// these blocks are free again.
    pub fn extend(&mut self, sequence: &mut Sequence, tokens: &[u32]) -> usize {
        if !sequence.is_in_tree() {
            return 0;
        }
        let known: Vec<PageId> = self.known(sequence.last_node(), tokens).collect();
        for &page in &known {
            self.adopt(sequence, page);
        }
        self.stats.hits += u64::from(sequence.reused == 0 && !known.is_empty());
        self.stats.hit_tokens += (known.len() * BLOCK) as u64;
        sequence.reused += known.len();
        known.len()
    }

    /// A second sequence with the committed blocks of `sequence`; those being written are not shared.
    pub fn fork(&mut self, sequence: &Sequence) -> Sequence {
        let pages = sequence.pages[..sequence.committed].to_vec();
        for &page in &pages {
            self.pool.share(page).expect("committed pages of a sequence are held");
        }
        Sequence { pages, ..*sequence }
    }

    /// Takes further committed blocks from `other`, until `sequence` has `blocks` of them. Returns their number. What the
    /// tree does for shared sequences, this does for private ones that the caller knows to begin with the same tokens.
    /// Pages reserved for these blocks are free again.
    ///
    /// # Panics
    /// If `sequence` is not private.
    pub fn follow(&mut self, sequence: &mut Sequence, other: &Sequence, blocks: usize) -> usize {
        assert_eq!(sequence.access, Access::Private, "shared sequences find blocks in the tree");
        let before = sequence.committed;
        for &page in other.pages[..other.committed.min(blocks)].iter().skip(before) {
            self.pool.share(page).expect("committed pages of a sequence are held");
            self.take_page(sequence, page);
        }
        sequence.committed - before
    }

    /// Makes sure that `sequence` has pages for its first `blocks` blocks, evicting idle blocks if need be; all of
    /// them, or none.
    pub fn reserve_up_to(&mut self, sequence: &mut Sequence, blocks: usize) -> Result<(), NoRoom> {
        let wanted = blocks.saturating_sub(sequence.pages.len());
        if wanted > self.available() {
            let (free, evictable) = (self.free_count(), self.idle);
            return Err(NoRoom { wanted, free, evictable, count: self.page_count() });
        }
        while self.free_count() < wanted {
            self.evict();
        }
        sequence.pages.extend(self.pool.reserve(wanted).expect("so many pages are free"));
        Ok(())
    }

    /// Gives back the pages of blocks that are not committed.
    pub fn unreserve(&mut self, sequence: &mut Sequence) {
        for page in sequence.pages.drain(sequence.committed..) {
            self.release_page(page);
        }
    }

    /// Says that the first uncommitted block of `sequence` is final: its page has the K/V of exactly `tokens` after
    /// the committed blocks. Others find it from now on, so the client must be shown all of it; a block that the text
    /// ends within is not committed at all.
    ///
    /// If another sequence was first with the same block, this one switches to that page and its own is free: both
    /// hold the same bits, since K/V depend on the tokens of the sequence only (batch invariance). The page table of
    /// the next forward therefore has to be read from [`Sequence::pages`] again.
    ///
    /// # Panics
    /// If no page is reserved for the block.
    pub fn commit(&mut self, sequence: &mut Sequence, tokens: &BlockTokens) -> Commit {
        let page = *sequence.pages.get(sequence.committed).expect("a page is reserved for the block");
        if sequence.is_in_tree() {
            let edge = Edge { parent: sequence.last_node(), tokens: *tokens };
            if let Some(&known) = self.edges.get(&edge) {
                self.adopt(sequence, known);
                self.stats.duplicates += 1;
                return Commit::Known;
            }
            self.pool.commit(page).expect("the page is being written");
            self.pool.share(page).expect("the page is committed");
            self.insert(page, Node { edge, depth: sequence.committed, children: 0, last_used: self.now });
            self.stats.inserted += 1;
            sequence.committed += 1;
            sequence.in_tree += 1;
            return Commit::Inserted;
        }
        self.pool.commit(page).expect("the page is being written");
        sequence.committed += 1;
        Commit::Private
    }

    /// Takes blocks from index `visible` on out of the tree again, since the client was not shown them after all: a
    /// stop string that began in one block was complete in a later one. Blocks that others hold or have built upon
    /// stay, with all before them. What is withdrawn belongs to the sequence alone.
    pub fn withdraw(&mut self, sequence: &mut Sequence, visible: usize) {
        while sequence.in_tree > visible {
            let page = sequence.pages[sequence.in_tree - 1];
            if self.node(page).children > 0 || self.pool.holders(page) > 2 {
                break;
            }
            self.detach(page);
            self.release_page(page);
            sequence.in_tree -= 1;
        }
    }

    /// Ends a sequence. Blocks in the tree stay there until their pages are needed, all others are free.
    pub fn release(&mut self, sequence: Sequence) {
        self.now += 1;
        let Sequence { pages, in_tree, .. } = sequence;
        for (block, page) in pages.into_iter().enumerate() {
            if block < in_tree {
                self.node_mut(page).last_used = self.now;
            }
            self.release_page(page);
            if block < in_tree && self.is_idle(page) {
                self.idle += 1;
                let Node { children, last_used, .. } = *self.node(page);
                if children == 0 {
                    self.idle_leaves.insert((last_used, page));
                }
            }
        }
    }

    /// Evicts every idle block.
    pub fn clear(&mut self) {
        while self.idle > 0 {
            self.evict();
        }
    }

    /// All blocks, warmest first and each after its parent.
    #[must_use]
    pub fn warmest(&self) -> Vec<CachedBlock> {
        let mut order: Vec<(PageId, &Node)> = self.edges.values().map(|&page| (page, self.node(page))).collect();
        // Held blocks have no last use yet. Their ancestors are held as well, and those of others were used no earlier.
        let warmth = |page, node: &Node| if self.is_idle(page) { node.last_used } else { i64::MAX };
        order.sort_by_key(|&(page, node)| (std::cmp::Reverse(warmth(page, node)), node.depth, page));
        let block =
            |(page, node): (PageId, &Node)| CachedBlock { page, parent: node.edge.parent, tokens: node.edge.tokens };
        order.into_iter().map(block).collect()
    }

    /// Brings back a block that an earlier process had: the last whole block of `tokens`, which are all blocks of its
    /// prefix. `fill` writes the K/V into a free page; if it fails, nothing has changed. Restored blocks are idle, and
    /// colder than each restored before and than all that were used since the start.
    pub fn restore<E>(&mut self, tokens: &[u32], fill: impl FnOnce(PageId) -> Result<(), E>) -> Result<Restored, E> {
        let (blocks, _) = tokens.as_chunks::<BLOCK>();
        let Some((last, before)) = blocks.split_last() else { return Ok(Restored::Known) };
        let chain: Vec<PageId> = self.known(None, tokens).collect();
        if chain.len() != before.len() {
            return Ok(if chain.len() == blocks.len() { Restored::Known } else { Restored::NoParent });
        }
        let Ok(reserved) = self.pool.reserve(1) else { return Ok(Restored::NoRoom) };
        let page = reserved[0];
        if let Err(error) = fill(page) {
            self.release_page(page);
            return Err(error);
        }
        self.pool.commit(page).expect("the page is being written");
        self.coldest -= 1;
        let edge = Edge { parent: chain.last().copied(), tokens: *last };
        self.insert(page, Node { edge, depth: before.len(), children: 0, last_used: self.coldest });
        self.idle += 1;
        self.idle_leaves.insert((self.coldest, page));
        self.stats.restored += 1;
        Ok(Restored::Inserted)
    }

    /// Whether everything the top of this file promises is true, given all sequences that are not released; the first
    /// thing that is not, otherwise. Looks at everything: for tests.
    pub fn check<'a>(&self, sequences: impl IntoIterator<Item = &'a Sequence>) -> Result<(), String> {
        let ensure = |holds: bool, what: &str, page: PageId| {
            if holds { Ok(()) } else { Err(format!("page {}: {what}", page.0)) }
        };
        let mut holders = vec![0u32; self.page_count()];
        for sequence in sequences {
            let Sequence { pages, committed, in_tree, .. } = sequence;
            let mut parent = None;
            for (block, &page) in pages.iter().enumerate() {
                holders[page.0 as usize] += 1;
                ensure(self.pool.is_committed(page) == (block < *committed), "committed unlike its sequence", page)?;
                let node = self.nodes[page.0 as usize];
                ensure(node.is_some() == (block < *in_tree), "in the tree unlike its sequence", page)?;
                if let Some(node) = node {
                    ensure(node.edge.parent == parent && node.depth == block, "elsewhere in the tree", page)?;
                }
                parent = Some(page);
            }
        }
        let (mut held, mut idle) = (0, 0);
        let mut children = vec![0; self.page_count()];
        for (page, node) in (0..).map(PageId).zip(&self.nodes) {
            let of_sequences = holders[page.0 as usize];
            let counted = of_sequences + u32::from(node.is_some());
            ensure(self.pool.holders(page) == counted, "has other holders than counted", page)?;
            held += usize::from(counted > 0);
            let Some(node) = node else { continue };
            ensure(self.pool.is_committed(page), "a node that is not committed", page)?;
            ensure(self.edges.get(&node.edge) == Some(&page), "a node that is not found", page)?;
            if let Some(parent) = node.edge.parent {
                let above = self.nodes[parent.0 as usize].as_ref().ok_or("a node without its parent")?;
                ensure(above.depth + 1 == node.depth, "at another depth than its parent says", page)?;
                ensure(of_sequences == 0 || holders[parent.0 as usize] > 0, "held without its parent", page)?;
                let later = of_sequences == 0 && node.last_used > above.last_used && holders[parent.0 as usize] == 0;
                ensure(!later, "used later than its parent", page)?;
                children[parent.0 as usize] += 1;
            } else {
                ensure(node.depth == 0, "a first block that is not at depth 0", page)?;
            }
            idle += usize::from(of_sequences == 0);
        }
        let mut idle_leaves = 0;
        for (page, node) in (0..).map(PageId).zip(&self.nodes) {
            let Some(node) = node else { continue };
            ensure(node.children == children[page.0 as usize], "has other children than counted", page)?;
            let is_idle_leaf = node.children == 0 && holders[page.0 as usize] == 0;
            let listed = self.idle_leaves.contains(&(node.last_used, page));
            ensure(listed == is_idle_leaf, "an idle leaf that is not listed, or the reverse", page)?;
            idle_leaves += usize::from(is_idle_leaf);
        }
        let sums = [
            ("free and held pages", held + self.free_count(), self.page_count()),
            ("idle nodes", self.idle, idle),
            ("edges", self.edges.len(), self.nodes.iter().flatten().count()),
            ("idle leaves", self.idle_leaves.len(), idle_leaves),
            ("pages in use", self.used_count(), holders.iter().filter(|&&count| count > 0).count()),
        ];
        for (what, found, expected) in sums {
            if found != expected {
                return Err(format!("{what}: {found}, expected {expected}"));
            }
        }
        Ok(())
    }

    /// Nodes below `parent` along the whole blocks of `tokens`, as far as there are any.
    fn known(&self, parent: Option<PageId>, tokens: &[u32]) -> impl Iterator<Item = PageId> {
        let (blocks, _) = tokens.as_chunks::<BLOCK>();
        blocks.iter().scan(parent, |parent, &tokens| {
            let page = *self.edges.get(&Edge { parent: *parent, tokens })?;
            *parent = Some(page);
            Some(page)
        })
    }

    /// Makes the node on `page` the next committed block of `sequence`, in place of a page reserved for it.
    fn adopt(&mut self, sequence: &mut Sequence, page: PageId) {
        if self.is_idle(page) {
            self.idle -= 1;
            let last_used = self.node(page).last_used;
            self.idle_leaves.remove(&(last_used, page));
        }
        self.pool.share(page).expect("nodes are committed");
        self.take_page(sequence, page);
        sequence.in_tree += 1;
    }

    /// Makes a page that was just shared the next committed one of `sequence`, in place of a page reserved for it.
    fn take_page(&mut self, sequence: &mut Sequence, page: PageId) {
        match sequence.pages.get_mut(sequence.committed) {
            Some(reserved) => {
                let reserved = std::mem::replace(reserved, page);
                self.release_page(reserved);
            }
            None => sequence.pages.push(page),
        }
        sequence.committed += 1;
    }

    /// Frees the page of the idle leaf that was used least recently.
    fn evict(&mut self) {
        let (_, page) = self.idle_leaves.pop_first().expect("some descendant of an idle node is an idle leaf");
        self.idle -= 1;
        self.detach(page);
        self.release_page(page);
        self.stats.evicted += 1;
    }

    fn insert(&mut self, page: PageId, node: Node) {
        if let Some(parent) = node.edge.parent {
            let parent_node = self.node_mut(parent);
            parent_node.children += 1;
            let last_used = parent_node.last_used;
            self.idle_leaves.remove(&(last_used, parent));
        }
        self.edges.insert(node.edge, page);
        self.nodes[page.0 as usize] = Some(node);
    }

    /// Takes a leaf out of the tree; its page is still held.
    fn detach(&mut self, page: PageId) {
        let Node { edge, .. } = self.nodes[page.0 as usize].take().expect("the page is a node");
        self.edges.remove(&edge);
        if let Some(parent) = edge.parent {
            let is_idle = self.is_idle(parent);
            let node = self.node_mut(parent);
            node.children -= 1;
            let (children, last_used) = (node.children, node.last_used);
            if is_idle && children == 0 {
                self.idle_leaves.insert((last_used, parent));
            }
        }
    }

    fn release_page(&mut self, page: PageId) {
        self.pool.release(page).expect("the page is held");
    }

    /// Whether only the tree holds this page.
    fn is_idle(&self, page: PageId) -> bool {
        self.nodes[page.0 as usize].is_some() && self.pool.holders(page) == 1
    }

    fn node(&self, page: PageId) -> &Node {
        self.nodes[page.0 as usize].as_ref().expect("the page is a node")
    }

    fn node_mut(&mut self, page: PageId) -> &mut Node {
        self.nodes[page.0 as usize].as_mut().expect("the page is a node")
    }
}

impl Sequence {
    /// Pages of all blocks so far, in order: committed ones, then reserved ones.
    #[must_use]
    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// Blocks whose K/V are final.
    #[must_use]
    pub fn committed(&self) -> usize {
        self.committed
    }

    /// Blocks that were found instead of computed: `cached_tokens` is 32 times this.
    #[must_use]
    pub fn reused(&self) -> usize {
        self.reused
    }

    /// Whether it uses the tree.
    #[must_use]
    pub fn access(&self) -> Access {
        self.access
    }

    /// Whether its next block can be looked for in the tree, or become a node.
    fn is_in_tree(&self) -> bool {
        self.access == Access::Shared && self.in_tree == self.committed
    }

    fn last_node(&self) -> Option<PageId> {
        self.in_tree.checked_sub(1).map(|last| self.pages[last])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A block that differs from those with other symbols in one or two tokens only.
    fn block(symbol: u8) -> BlockTokens {
        let mut tokens = [7; BLOCK];
        tokens[usize::from(symbol) % BLOCK] = 1000 + u32::from(symbol);
        tokens
    }

    fn tokens(symbols: &[u8]) -> Vec<u32> {
        symbols.iter().flat_map(|&symbol| block(symbol)).collect()
    }

    /// Runs a request of these blocks to its end, as far as it is not known.
    fn run(cache: &mut PrefixCache, symbols: &[u8]) -> usize {
        let mut sequence = cache.begin(&tokens(symbols), Access::Shared);
        let reused = sequence.reused();
        cache.reserve_up_to(&mut sequence, symbols.len()).unwrap();
        for &symbol in &symbols[reused..] {
            assert_eq!(cache.commit(&mut sequence, &block(symbol)), Commit::Inserted);
        }
        cache.check([&sequence]).unwrap();
        cache.release(sequence);
        cache.check([]).unwrap();
        reused
    }

    #[test]
    fn a_block_is_found_only_with_all_its_tokens_and_all_before_it() {
        let mut cache = PrefixCache::new(8);
        assert_eq!(run(&mut cache, &[1, 2, 3]), 0);
        assert_eq!(run(&mut cache, &[1, 2, 3]), 3);
        assert_eq!(run(&mut cache, &[1, 2, 4]), 2);
        assert_eq!(cache.find(&tokens(&[2, 3])), Found::default());
        assert_eq!(cache.find(&tokens(&[1, 2])[..63]), Found { blocks: 1, idle: 1 });
        assert_eq!(cache.find(&[]), Found::default());
        for index in 0..BLOCK {
            let mut other = tokens(&[1, 2, 3]);
            other[BLOCK + index] ^= 1;
            assert_eq!(cache.find(&other).blocks, 1);
        }
        let expected = CacheStats { lookups: 3, hits: 2, hit_tokens: 160, inserted: 4, ..CacheStats::default() };
        assert_eq!(cache.stats(), expected);
    }

    #[test]
    fn what_was_used_least_recently_makes_room_and_leaves_go_first() {
        let mut cache = PrefixCache::new(5);
        run(&mut cache, &[1, 2]);
        run(&mut cache, &[3]);
        run(&mut cache, &[1, 4]);
        let known = |cache: &PrefixCache| -> Vec<usize> {
            [&[1, 2][..], &[1, 4], &[3]].into_iter().map(|path| cache.find(&tokens(path)).blocks).collect()
        };
        let mut sequence = cache.begin(&[], Access::Shared);
        let mut seen = Vec::new();
        for blocks in 1..=5 {
            cache.reserve_up_to(&mut sequence, blocks).unwrap();
            seen.push(known(&cache));
        }
        assert_eq!(seen, [[2, 2, 1], [1, 2, 1], [1, 2, 0], [1, 1, 0], [0, 0, 0]]);
        let refused = cache.reserve_up_to(&mut sequence, 7).unwrap_err();
        assert_eq!(refused, NoRoom { wanted: 2, free: 0, evictable: 0, count: 5 });
        let message = "2 more pages are needed, but of 5 only 0 are free and 0 can be evicted";
        assert_eq!(refused.to_string(), message);
        assert_eq!((cache.stats().evicted, cache.used_count()), (4, 5));
        cache.release(sequence);
        assert_eq!(cache.available(), 5);
    }

    #[test]
    fn what_a_sequence_holds_is_not_evicted() {
        let mut cache = PrefixCache::new(4);
        run(&mut cache, &[1, 2, 3]);
        let holder = cache.begin(&tokens(&[1, 2]), Access::Shared);
        assert_eq!((cache.available(), cache.used_count(), cache.idle_count()), (2, 2, 1));
        let found = cache.find(&tokens(&[1, 2, 3]));
        assert_eq!(found, Found { blocks: 3, idle: 1 });
        assert!(cache.fits(found, 4) && !cache.fits(found, 5));
        let mut other = cache.begin(&tokens(&[9]), Access::Shared);
        assert!(cache.reserve_up_to(&mut other, 3).is_err());
        cache.reserve_up_to(&mut other, 2).unwrap();
        cache.check([&holder, &other]).unwrap();
        assert_eq!(cache.find(&tokens(&[1, 2, 3])).blocks, 2);
        cache.release(other);
        cache.release(holder);
        cache.clear();
        assert_eq!((cache.free_count(), cache.cached_count()), (4, 0));
    }

    #[test]
    fn of_two_sequences_with_the_same_block_the_second_switches_to_the_firsts_page() {
        let mut cache = PrefixCache::new(8);
        let mut first = cache.begin(&[], Access::Shared);
        let mut second = cache.begin(&[], Access::Shared);
        cache.reserve_up_to(&mut first, 3).unwrap();
        cache.reserve_up_to(&mut second, 3).unwrap();
        assert_eq!(cache.commit(&mut first, &block(1)), Commit::Inserted);
        assert_eq!(cache.commit(&mut second, &block(1)), Commit::Known);
        assert_eq!(first.pages()[0], second.pages()[0]);
        assert_eq!((cache.free_count(), second.committed(), second.reused()), (3, 1, 0));
        assert_eq!(cache.commit(&mut first, &block(2)), Commit::Inserted);
        assert_eq!(cache.extend(&mut second, &tokens(&[2, 3])), 1, "found between two chunks of a prefill");
        assert_eq!(cache.commit(&mut second, &block(3)), Commit::Inserted);
        cache.check([&first, &second]).unwrap();
        cache.release(first);
        cache.release(second);
        assert_eq!((cache.cached_count(), cache.stats().duplicates, cache.stats().hits), (3, 1, 1));
    }

    #[test]
    fn a_private_sequence_neither_reads_nor_writes_the_tree() {
        let mut cache = PrefixCache::new(6);
        run(&mut cache, &[1]);
        let mut private = cache.begin(&tokens(&[1]), Access::Private);
        assert_eq!(private.committed(), 0);
        cache.reserve_up_to(&mut private, 3).unwrap();
        assert_eq!(cache.commit(&mut private, &block(1)), Commit::Private);
        assert_eq!(cache.commit(&mut private, &block(2)), Commit::Private);
        assert_eq!(cache.extend(&mut private, &tokens(&[3])), 0);
        let fork = cache.fork(&private);
        assert_eq!(fork.pages(), &private.pages()[..2]);
        cache.check([&private, &fork]).unwrap();
        cache.release(private);
        assert_eq!((cache.cached_count(), cache.used_count()), (1, 2));
        cache.release(fork);
        assert_eq!((cache.free_count(), cache.stats().lookups), (5, 1));
    }

    #[test]
    fn what_the_client_did_not_see_is_withdrawn_unless_others_use_it() {
        let mut cache = PrefixCache::new(8);
        let mut sequence = cache.begin(&[], Access::Shared);
        cache.reserve_up_to(&mut sequence, 4).unwrap();
        for symbol in 1..=3 {
            cache.commit(&mut sequence, &block(symbol));
        }
        let other = cache.begin(&tokens(&[1, 2]), Access::Shared);
        cache.withdraw(&mut sequence, 1);
        assert_eq!(cache.find(&tokens(&[1, 2, 3])).blocks, 2, "the second is in use elsewhere");
        assert_eq!(cache.commit(&mut sequence, &block(4)), Commit::Private);
        cache.check([&sequence, &other]).unwrap();
        cache.release(other);
        cache.release(sequence);
        assert_eq!((cache.cached_count(), cache.free_count()), (2, 6));
    }

    #[test]
    fn restored_blocks_are_colder_than_used_ones_and_take_only_free_pages() {
        let mut cache = PrefixCache::new(4);
        let restore = |cache: &mut PrefixCache, symbols: &[u8]| cache.restore(&tokens(symbols), |_| Ok::<_, ()>(()));
        assert_eq!(restore(&mut cache, &[1]), Ok(Restored::Inserted));
        assert_eq!(restore(&mut cache, &[1]), Ok(Restored::Known));
        assert_eq!(restore(&mut cache, &[2, 3]), Ok(Restored::NoParent));
        assert_eq!(restore(&mut cache, &[1, 2]), Ok(Restored::Inserted));
        assert_eq!(cache.restore(&tokens(&[5]), |_| Err("broken")), Err("broken"));
        cache.check([]).unwrap();
        run(&mut cache, &[3]);
        assert_eq!(restore(&mut cache, &[4]), Ok(Restored::Inserted));
        assert_eq!(restore(&mut cache, &[5]), Ok(Restored::NoRoom));
        let order: Vec<Vec<u32>> = cache.warmest().iter().map(|cached| cached.tokens.to_vec()).collect();
        assert_eq!(order, [3, 1, 2, 4].map(|symbol| block(symbol).to_vec()));
        run(&mut cache, &[6]);
        assert_eq!((cache.find(&tokens(&[4])).blocks, cache.find(&tokens(&[1, 2])).blocks), (0, 2));
    }

    /// The obvious twin: paths in a map, everything looked at every time.
    #[derive(Default)]
    struct Model {
        page_count: usize,
        /// When each node was last let go of, by its path from the root.
        nodes: HashMap<Vec<u8>, i64>,
        sequences: Vec<ModelSequence>,
        now: i64,
        coldest: i64,
    }

    #[derive(Clone, Default)]
    struct ModelSequence {
        path: Vec<u8>,
        in_tree: usize,
        /// Names of the pages of committed blocks that are not in the tree; forks share them.
        own: Vec<usize>,
        reserved: usize,
        is_private: bool,
    }

    impl Model {
        fn is_held(&self, path: &[u8]) -> bool {
            self.sequences.iter().any(|sequence| sequence.path[..sequence.in_tree].starts_with(path))
        }

        fn has_children(&self, path: &[u8]) -> bool {
            self.nodes.keys().any(|other| other.len() == path.len() + 1 && other.starts_with(path))
        }

        fn idle(&self) -> usize {
            self.nodes.keys().filter(|path| !self.is_held(path)).count()
        }

        fn free(&self) -> usize {
            let own: BTreeSet<usize> = self.sequences.iter().flat_map(|sequence| sequence.own.clone()).collect();
            let reserved: usize = self.sequences.iter().map(|sequence| sequence.reserved).sum();
            self.page_count - self.nodes.len() - own.len() - reserved
        }

        /// Blocks of `wanted` that are known below `path`.
        fn known(&self, path: &[u8], wanted: &[u8]) -> usize {
            let below = |blocks: &usize| self.nodes.contains_key(&[path, &wanted[..*blocks]].concat());
            (1..=wanted.len()).take_while(below).count()
        }

        fn evict(&mut self) {
            let leaves = self.nodes.iter().filter(|(path, _)| !self.is_held(path) && !self.has_children(path));
            let coldest = leaves.min_by_key(|(_, last_used)| **last_used).unwrap().0.clone();
            self.nodes.remove(&coldest);
        }
    }

    /// The cache, its model, and what a backend's pages would hold.
    struct Trial {
        cache: PrefixCache,
        model: Model,
        sequences: Vec<Sequence>,
        contents: HashMap<PageId, Vec<u8>>,
        own_pages: usize,
    }

    impl Trial {
        fn new(page_count: usize) -> Self {
            Self {
                cache: PrefixCache::new(page_count),
                model: Model { page_count, ..Model::default() },
                sequences: Vec::new(),
                contents: HashMap::new(),
                own_pages: 0,
            }
        }

        fn step(&mut self, random: &mut fastrand::Rng) {
            let path: Vec<u8> = (0..random.usize(..6)).map(|_| random.u8(..3)).collect();
            let index = random.usize(..self.sequences.len().max(1));
            let operation = random.u8(..100);
            if operation < 3 {
                self.restore(&path);
            } else if operation < 4 && random.u8(..10) == 0 {
                self.cache.clear();
                while self.model.idle() > 0 {
                    self.model.evict();
                }
            } else if self.sequences.is_empty() || (operation < 20 && self.sequences.len() < 6) {
                self.begin(&path, random.u8(..5) == 0);
            } else {
                match operation {
                    0..35 => self.release(index),
                    35..43 => self.extend(index, &path),
                    43..60 => self.reserve(index, random.usize(..4)),
                    60..64 => self.fork(index),
                    64..67 => self.withdraw(index, random.usize(..5)),
                    67..70 => self.unreserve(index),
                    _ => self.commit(index, random.u8(..3)),
                }
            }
        }

        fn begin(&mut self, path: &[u8], is_private: bool) {
            let access = if is_private { Access::Private } else { Access::Shared };
            let known = self.model.known(&[], path);
            assert_eq!(self.cache.find(&tokens(path)).blocks, known);
            let blocks = if is_private { 0 } else { known };
            self.sequences.push(self.cache.begin(&tokens(path), access));
            let (path, in_tree) = (path[..blocks].to_vec(), blocks);
            self.model.sequences.push(ModelSequence { path, in_tree, is_private, ..ModelSequence::default() });
        }

        fn extend(&mut self, index: usize, path: &[u8]) {
            let before = self.model.sequences[index].clone();
            let can = !before.is_private && before.in_tree == before.path.len();
            let known = if can { self.model.known(&before.path, path) } else { 0 };
            assert_eq!(self.cache.extend(&mut self.sequences[index], &tokens(path)), known);
            let sequence = &mut self.model.sequences[index];
            sequence.path.extend(&path[..known]);
            sequence.in_tree += known;
            sequence.reserved = sequence.reserved.saturating_sub(known);
        }

        fn reserve(&mut self, index: usize, more: usize) {
            let blocks = self.sequences[index].pages().len() + more;
            let fits = more <= self.model.free() + self.model.idle();
            let reserved = self.cache.reserve_up_to(&mut self.sequences[index], blocks);
            assert_eq!(reserved.is_ok(), fits);
            if fits {
                while self.model.free() < more {
                    self.model.evict();
                }
                self.model.sequences[index].reserved += more;
                for page in &self.sequences[index].pages()[blocks - more..] {
                    self.contents.remove(page);
                }
            }
        }

        fn unreserve(&mut self, index: usize) {
            self.cache.unreserve(&mut self.sequences[index]);
            self.model.sequences[index].reserved = 0;
        }

        fn commit(&mut self, index: usize, symbol: u8) {
            let before = self.model.sequences[index].clone();
            if before.reserved == 0 {
                return;
            }
            let path = [&before.path[..], &[symbol]].concat();
            let own = self.sequences[index].pages()[before.path.len()];
            self.contents.insert(own, path.clone());
            let expected = match self.model.nodes.contains_key(&path) {
                _ if before.is_private || before.in_tree < before.path.len() => Commit::Private,
                true => Commit::Known,
                false => Commit::Inserted,
            };
            assert_eq!(self.cache.commit(&mut self.sequences[index], &block(symbol)), expected);
            if expected == Commit::Inserted {
                self.model.nodes.insert(path.clone(), 0);
            }
            let sequence = &mut self.model.sequences[index];
            if expected == Commit::Private {
                self.own_pages += 1;
                sequence.own.push(self.own_pages);
            } else {
                sequence.in_tree += 1;
            }
            sequence.path = path;
            sequence.reserved -= 1;
        }

        fn fork(&mut self, index: usize) {
            if self.sequences.len() < 6 {
                let sequence = self.model.sequences[index].clone();
                self.model.sequences.push(ModelSequence { reserved: 0, ..sequence });
                self.sequences.push(self.cache.fork(&self.sequences[index]));
            }
        }

        fn withdraw(&mut self, index: usize, visible: usize) {
            self.cache.withdraw(&mut self.sequences[index], visible);
            let mut sequence = std::mem::take(&mut self.model.sequences[index]);
            while sequence.in_tree > visible {
                let path = &sequence.path[..sequence.in_tree];
                if self.model.is_held(path) || self.model.has_children(path) {
                    break;
                }
                self.model.nodes.remove(path);
                sequence.in_tree -= 1;
                self.own_pages += 1;
                sequence.own.push(self.own_pages);
            }
            self.model.sequences[index] = sequence;
        }

        fn release(&mut self, index: usize) {
            self.cache.release(self.sequences.swap_remove(index));
            let sequence = self.model.sequences.swap_remove(index);
            self.model.now += 1;
            for end in 1..=sequence.in_tree {
                self.model.nodes.insert(sequence.path[..end].to_vec(), self.model.now);
            }
        }

        fn restore(&mut self, path: &[u8]) {
            let expected = match path.split_last() {
                _ if self.model.known(&[], path) == path.len() => Restored::Known,
                Some((_, before)) if self.model.known(&[], before) < before.len() => Restored::NoParent,
                _ if self.model.free() == 0 => Restored::NoRoom,
                _ => Restored::Inserted,
            };
            let contents = &mut self.contents;
            let restored = self.cache.restore(&tokens(path), |page| {
                contents.insert(page, path.to_vec());
                Ok::<_, ()>(())
            });
            assert_eq!(restored, Ok(expected));
            if expected == Restored::Inserted {
                self.model.coldest -= 1;
                self.model.nodes.insert(path.to_vec(), self.model.coldest);
            }
        }

        fn check(&self) {
            self.cache.check(&self.sequences).unwrap();
            let counts = (self.cache.free_count(), self.cache.idle_count(), self.cache.cached_count());
            assert_eq!(counts, (self.model.free(), self.model.idle(), self.model.nodes.len()));
            for path in self.model.nodes.keys() {
                assert_eq!(self.cache.find(&tokens(path)).blocks, path.len());
            }
            for (sequence, expected) in self.sequences.iter().zip(&self.model.sequences) {
                assert_eq!(sequence.committed(), expected.path.len());
                assert_eq!(sequence.pages().len(), expected.path.len() + expected.reserved);
                for (block, page) in sequence.pages()[..sequence.committed()].iter().enumerate() {
                    assert_eq!(self.contents[page], expected.path[..=block], "another block's keys and values");
                }
            }
        }
    }

    #[test]
    fn tens_of_thousands_of_random_operations_go_as_in_the_model() {
        for (seed, page_count) in [(1, 3), (2, 8), (3, 16), (4, 40)] {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut trial = Trial::new(page_count);
            for _ in 0..15_000 {
                trial.step(&mut random);
                trial.check();
            }
            let CacheStats { hits, duplicates, restored, evicted, .. } = trial.cache.stats();
            assert!(hits.min(duplicates).min(evicted).min(restored) > 20, "{:?}", trial.cache.stats());
            for sequence in std::mem::take(&mut trial.sequences) {
                trial.cache.release(sequence);
            }
            trial.cache.check([]).unwrap();
            assert_eq!((trial.cache.used_count(), trial.cache.available()), (0, page_count));
        }
    }
}
