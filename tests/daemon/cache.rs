//! The prefix cache with real pages: what it saves and brings back is the same bits, and what is damaged is not taken.

use std::io::Read;
use std::path::Path;

use minnow_common::BLOCK;
use minnow_formats::checkpoint::Checkpoint;
use minnow_formats::io::IoBackend;
use minnow_tests::checkpoint;
use minnowd::cache::{Access, Commit, PageId, PrefixCache};
use minnowd::model::cpu::Cpu;
use minnowd::model::reference::Reference;
use minnowd::model::{Backend, Batch, ModelError, Need, Output, Segment};
use minnowd::persist::{self, CacheKey, Identity, Ignored, LoadEnd, Loader, SaveError};
use minnowd::weights::{LoadOptions, VerifyPayload, Weights};

const PAGES: usize = 24;
/// Bytes of the file's header, and of a block without its page, as `persist` documents them.
const HEADER_BYTES: usize = 84;
const BLOCK_FIELD_BYTES: usize = 164;

/// Three conversations, two of which begin alike; 3, 4 and 2 blocks.
fn conversations() -> [Vec<u32>; 3] {
    let tokens = |salt: u32, blocks: usize| (0..(blocks * BLOCK) as u32).map(move |i| (i * 7 + salt * 31 + 3) % 480);
    [tokens(1, 3).collect(), tokens(1, 2).chain(tokens(2, 2)).collect(), tokens(3, 2).collect()]
}

fn weights() -> Weights {
    let folder = tempfile::tempdir().unwrap();
    checkpoint::write("t16", 1, folder.path());
    let checkpoint = Checkpoint::open(folder.path(), IoBackend::Buffered).unwrap();
    Weights::load(&checkpoint, LoadOptions { verify_payload: VerifyPayload::Never, ..LoadOptions::default() }).unwrap()
}

fn backends(weights: &Weights) -> [Box<dyn Backend>; 2] {
    [
        Box::new(Cpu::new(weights.clone(), PAGES, Some(1), None).unwrap()),
        Box::new(Reference::new(weights, PAGES).unwrap()),
    ]
}

fn identity(backend: &dyn Backend) -> CacheKey {
    let arithmetic = backend.arithmetic();
    CacheKey::new(&Identity { checkpoint: "t16", arithmetic: &arithmetic, program: "1" }, backend.page_bytes())
}

/// Reads a prompt of whole blocks, as far as the cache does not know it. Returns how many blocks it knew.
fn prefill(cache: &mut PrefixCache, backend: &mut dyn Backend, tokens: &[u32]) -> usize {
    let mut sequence = cache.begin(tokens, Access::Shared);
    let reused = sequence.reused();
    let (blocks, _) = tokens[reused * BLOCK..].as_chunks();
    for block in blocks {
        let blocks = sequence.committed() + 1;
        cache.reserve_up_to(&mut sequence, blocks).unwrap();
        let segments = [Segment { tokens: block, pages: sequence.pages(), need: Need::Nothing }];
        backend.forward(&Batch { segments: &segments }, None).unwrap();
        assert_eq!(cache.commit(&mut sequence, block), Commit::Inserted);
    }
    cache.check([&sequence]).unwrap();
    cache.release(sequence);
    reused
}

/// The pages of the known blocks of `tokens`, as the backend exports them.
fn exported(cache: &mut PrefixCache, backend: &dyn Backend, tokens: &[u32]) -> Vec<Vec<u8>> {
    let sequence = cache.begin(tokens, Access::Shared);
    let pages = sequence.pages().iter().map(|&page| export(backend, page).unwrap()).collect();
    cache.release(sequence);
    pages
}

fn export(backend: &dyn Backend, page: PageId) -> Result<Vec<u8>, ModelError> {
    let mut bytes = vec![0; backend.page_bytes()];
    backend.export_page(page, &mut bytes)?;
    Ok(bytes)
}

/// Logits of one more block after the known blocks of `tokens`.
fn logits_after(cache: &mut PrefixCache, backend: &mut dyn Backend, tokens: &[u32]) -> Vec<u32> {
    let mut sequence = cache.begin(tokens, Access::Shared);
    let blocks = sequence.committed() + 1;
    cache.reserve_up_to(&mut sequence, blocks).unwrap();
    let segments = [Segment { tokens: &[17; BLOCK], pages: sequence.pages(), need: Need::Logits }];
    let outputs = backend.forward(&Batch { segments: &segments }, None).unwrap();
    cache.release(sequence);
    let Some(Output::Logits(logits)) = outputs.into_iter().next() else { panic!("logits were asked for") };
    logits.values().iter().map(|value| value.to_bits()).collect()
}

/// A cache with all conversations in it, the third one used last.
fn warm(backend: &mut dyn Backend) -> PrefixCache {
    let mut cache = PrefixCache::new(backend.page_count());
    let reused: Vec<usize> = conversations().iter().map(|tokens| prefill(&mut cache, backend, tokens)).collect();
    assert_eq!(reused, [0, 2, 0]);
    cache
}

#[test]
fn what_is_saved_comes_back_bit_for_bit() {
    let weights = weights();
    let folder = tempfile::tempdir().unwrap();
    for (mut first, mut second) in backends(&weights).into_iter().zip(backends(&weights)) {
        let folder = folder.path().join(first.arithmetic());
        let key = identity(&*first);
        let mut cache = warm(&mut *first);
        let saved = persist::save(&folder, &key, u64::MAX, &cache, &*first).unwrap();
        assert_eq!((saved.blocks, saved.left_out), (7, 0));
        assert_eq!(folder.join("prefix-cache.bin").metadata().unwrap().len(), saved.file_bytes);
        assert!(!folder.join("prefix-cache.bin.partial").exists());

        // The pages of the second backend are taken in another order.
        let mut other = PrefixCache::new(PAGES);
        prefill(&mut other, &mut *second, &[5; BLOCK]);
        let mut loader = persist::open(&folder, &key).unwrap().unwrap();
        assert_eq!(loader.load(3, &mut other, &mut *second).restored, 3);
        other.check([]).unwrap();
        assert!(loader.report().end.is_none());
        let report = loader.load(usize::MAX, &mut other, &mut *second);
        assert_eq!(report.to_string(), "7 blocks of the saved prefix cache restored");
        assert!(matches!(report.end, Some(LoadEnd::Whole)));
        other.check([]).unwrap();
        for tokens in conversations() {
            let pages = exported(&mut cache, &*first, &tokens);
            assert_eq!(pages.len(), tokens.len() / BLOCK);
            assert!(pages == exported(&mut other, &*second, &tokens), "{}: other bits", first.describe());
            let expected = logits_after(&mut cache, &mut *first, &tokens);
            assert!(expected == logits_after(&mut other, &mut *second, &tokens), "{}: other logits", first.describe());
        }
    }
}

#[test]
fn a_limit_keeps_the_warmest_blocks_with_all_before_them() {
    let mut backend = backends(&weights()).into_iter().next().unwrap();
    let key = identity(&*backend);
    let cache = warm(&mut *backend);
    let mut all = Vec::new();
    persist::write(&mut all, &key, u64::MAX, &cache, &*backend).unwrap();
    let block_bytes = backend.page_bytes() + BLOCK_FIELD_BYTES;
    assert_eq!(all.len(), HEADER_BYTES + 7 * block_bytes);
    // The last conversation comes first, then what the second one has.
    for (blocks, known) in [(0, [0, 0, 0]), (1, [0, 0, 1]), (4, [2, 2, 2]), (6, [2, 4, 2]), (7, [3, 4, 2])] {
        let mut file = Vec::new();
        let limit = (HEADER_BYTES + blocks * block_bytes + block_bytes / 2) as u64;
        let saved = persist::write(&mut file, &key, limit, &cache, &*backend).unwrap();
        assert_eq!((saved.blocks, saved.left_out, saved.file_bytes), (blocks, 7 - blocks, file.len() as u64));
        assert!(file.len() as u64 <= limit);
        let mut other = PrefixCache::new(PAGES);
        load(&file, &key, &mut other, &mut *backend).unwrap();
        assert_eq!(conversations().map(|tokens| other.find(&tokens).blocks), known);
    }
    let mut small = PrefixCache::new(3);
    let end = load(&all, &key, &mut small, &mut *backend).unwrap();
    assert!(matches!(end, LoadEnd::NoRoom));
    assert_eq!((small.idle_count(), small.free_count()), (3, 0));
}

/// Loads all of `file`; why reading ended.
fn load(file: &[u8], key: &CacheKey, cache: &mut PrefixCache, backend: &mut dyn Backend) -> Result<LoadEnd, Ignored> {
    let mut loader = Loader::new(Trickle(file), key)?;
    while loader.load(1, cache, backend).end.is_none() {}
    cache.check([]).unwrap();
    let report = loader.into_report();
    assert_eq!(report.restored, cache.cached_count());
    Ok(report.end.unwrap())
}

/// A reader that gives less than it is asked for.
struct Trickle<'a>(&'a [u8]);

impl Read for Trickle<'_> {
    fn read(&mut self, out: &mut [u8]) -> std::io::Result<usize> {
        let bytes = out.len().min(50_000);
        self.0.read(&mut out[..bytes])
    }
}

/// Loads a damaged file and says how many blocks came back, all of which must have the bits they had.
fn loaded_blocks(file: &[u8], key: &CacheKey, backend: &mut dyn Backend, expected: &[Vec<Vec<u8>>; 3]) -> usize {
    let mut cache = PrefixCache::new(PAGES);
    if load(file, key, &mut cache, backend).is_err() {
        return 0;
    }
    for (tokens, expected) in conversations().iter().zip(expected) {
        let pages = exported(&mut cache, backend, tokens);
        assert!(pages[..] == expected[..pages.len()], "a wrong page was restored");
    }
    // Nothing but the blocks of these conversations is there.
    let [a, b, c] = conversations().map(|tokens| cache.find(&tokens).blocks);
    assert_eq!(cache.cached_count(), a + b - a.min(b).min(2) + c);
    cache.cached_count()
}

#[test]
fn no_damage_makes_a_wrong_page() {
    let mut backend = backends(&weights()).into_iter().next().unwrap();
    let key = identity(&*backend);
    let mut cache = warm(&mut *backend);
    let expected = conversations().map(|tokens| exported(&mut cache, &*backend, &tokens));
    let mut file = Vec::new();
    persist::write(&mut file, &key, u64::MAX, &cache, &*backend).unwrap();
    let block_bytes = backend.page_bytes() + BLOCK_FIELD_BYTES;
    let mut blocks_of = |file: &[u8]| loaded_blocks(file, &key, &mut *backend, &expected);
    assert_eq!(blocks_of(&file), 7);

    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..150 {
        // Half of them where the structure is, half anywhere.
        let at = match random.bool() {
            true => random.usize(..file.len()),
            false => (random.usize(..8) * block_bytes + random.usize(..HEADER_BYTES + 132)).min(file.len() - 1),
        };
        let mut damaged = file.clone();
        damaged[at] ^= 1 << random.u8(..8);
        let blocks = blocks_of(&damaged);
        assert!(blocks < 7, "a flipped bit at {at} was not noticed");
        assert_eq!(blocks == 0, at < HEADER_BYTES, "{blocks} blocks after a flipped bit at {at}");
    }
    for part in 0..20 {
        let cut = file.len() * part / 20;
        assert_eq!(blocks_of(&file[..cut]), cut.saturating_sub(HEADER_BYTES) / block_bytes, "cut at {cut}");
    }
    let block = |index: usize| &file[HEADER_BYTES + index * block_bytes..][..block_bytes];
    // Blocks in another order: what comes before its parent is lost, and nothing else is mistaken for it.
    let reversed: Vec<u8> =
        (0..7).rev().fold(file[..HEADER_BYTES].to_vec(), |all, index| [&all, block(index)].concat());
    assert!(blocks_of(&reversed) < 7);
    let doubled = [&file[..], &file[HEADER_BYTES..]].concat();
    assert_eq!(blocks_of(&doubled), 7);
    let garbage: Vec<u8> = (0..3 * block_bytes + 5).map(|_| random.u8(..)).collect();
    assert_eq!(blocks_of(&[&file[..], &garbage].concat()), 7);
    assert_eq!(blocks_of(&[&file[..HEADER_BYTES], &garbage].concat()), 0);
    assert_eq!(blocks_of(&garbage), 0);
    assert_eq!(blocks_of(&[]), 0);
    for parent in [2, 7, 8, u32::MAX] {
        let mut elsewhere = file.clone();
        elsewhere[HEADER_BYTES..][..4].copy_from_slice(&parent.to_le_bytes());
        assert!(blocks_of(&elsewhere) < 7, "a first block below block {parent}");
    }
}

#[test]
fn blocks_of_two_files_do_not_mix() {
    let mut backend = backends(&weights()).into_iter().next().unwrap();
    let key = identity(&*backend);
    let [a, _, c] = conversations();
    // Two files whose second blocks have the same tokens after different first blocks.
    let file = |backend: &mut dyn Backend, first: &[u32]| {
        let mut cache = PrefixCache::new(PAGES);
        prefill(&mut cache, backend, &[&first[..BLOCK], &a[BLOCK..2 * BLOCK]].concat());
        let mut file = Vec::new();
        persist::write(&mut file, &key, u64::MAX, &cache, backend).unwrap();
        file
    };
    let (one, other) = (file(&mut *backend, &a), file(&mut *backend, &c));
    let second_at = HEADER_BYTES + backend.page_bytes() + BLOCK_FIELD_BYTES;
    let mixed = [&one[..second_at], &other[second_at..]].concat();
    let mut cache = PrefixCache::new(PAGES);
    load(&mixed, &key, &mut cache, &mut *backend).unwrap();
    assert_eq!((cache.find(&a).blocks, cache.cached_count()), (1, 1));
}

#[test]
fn files_of_others_are_ignored_with_a_reason_and_replaced() {
    let mut backend = backends(&weights()).into_iter().next().unwrap();
    let key = identity(&*backend);
    let cache = warm(&mut *backend);
    let temporary = tempfile::tempdir().unwrap();
    let folder = temporary.path();
    let file = folder.join("prefix-cache.bin");
    let reason = |key: &CacheKey| persist::open(folder, key).err().map(|ignored| ignored.to_string());
    assert!(persist::open(folder, &key).unwrap().is_none());
    persist::save(folder, &key, u64::MAX, &cache, &*backend).unwrap();
    assert_eq!(reason(&key), None);

    let page_bytes = backend.page_bytes();
    let own = Identity { checkpoint: "t16", arithmetic: &backend.arithmetic(), program: "1" };
    let others = [
        CacheKey::new(&Identity { checkpoint: "t64", ..own }, page_bytes),
        CacheKey::new(&Identity { arithmetic: "cpu abacus", ..own }, page_bytes),
        CacheKey::new(&Identity { program: "2", ..own }, page_bytes),
        CacheKey::new(&own, page_bytes + 4),
    ];
    for other in others {
        let expected = "it belongs to another checkpoint, backend or version of this program";
        assert_eq!(reason(&other).as_deref(), Some(expected));
    }
    let whole = std::fs::read(&file).unwrap();
    let damaged = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 3;
        std::fs::write(&file, bytes).unwrap();
        reason(&key).unwrap()
    };
    assert_eq!(damaged(0), "it is no prefix cache");
    assert_eq!(damaged(8), "it has version 2, expected 1");
    assert_eq!(damaged(12), "its header is damaged");
    assert_eq!(damaged(30), "its header is damaged");
    std::fs::remove_file(&file).unwrap();
    std::fs::create_dir(&file).unwrap();
    assert!(reason(&key).is_some());
    std::fs::remove_dir(&file).unwrap();

    persist::save(folder, &key, u64::MAX, &cache, &*backend).unwrap();
    assert!(std::fs::read(&file).unwrap() == whole);
}

#[test]
fn a_failed_save_leaves_the_older_file() {
    let mut backend = backends(&weights()).into_iter().next().unwrap();
    let key = identity(&*backend);
    let mut cache = warm(&mut *backend);
    let folder = tempfile::tempdir().unwrap();
    let save = |folder: &Path, cache: &PrefixCache| persist::save(folder, &key, u64::MAX, cache, &*backend);
    save(folder.path(), &cache).unwrap();
    let file = folder.path().join("prefix-cache.bin");
    let before = std::fs::read(&file).unwrap();

    let lock = std::fs::File::open(folder.path().join("prefix-cache.lock")).unwrap();
    lock.lock().unwrap();
    assert!(matches!(save(folder.path(), &cache), Err(SaveError::Busy { .. })));
    drop(lock);
    assert!(matches!(save(&file, &cache), Err(SaveError::Io { doing: "creating the folder", .. })));

    // A block whose page the backend never wrote.
    cache.restore(&[9; BLOCK], |_| Ok::<_, ModelError>(())).unwrap();
    let error = save(folder.path(), &cache).unwrap_err();
    assert_eq!(error.to_string(), format!("page 7 of {PAGES} has no keys and values to copy"));
    assert!(std::fs::read(&file).unwrap() == before);
    assert!(!folder.path().join("prefix-cache.bin.partial").exists());
}

#[test]
fn pages_are_copied_whole_or_refused_with_numbers() {
    for mut backend in backends(&weights()) {
        let bytes = backend.page_bytes();
        // t16: 3 layers of K and V, one head of 128, 32 positions; f32, or BF16 where products are in BF16.
        let elements = 3 * 2 * 128 * 32;
        assert!([2 * elements, 4 * elements].contains(&bytes), "{bytes}");
        let empty = format!("page 4 of {PAGES} has no keys and values to copy");
        assert_eq!(export(&*backend, PageId(4)).unwrap_err().to_string(), empty);
        let beyond = backend.import_page(PageId(PAGES as u32), &vec![0; bytes]).unwrap_err();
        assert_eq!(beyond.to_string(), format!("page {PAGES} of {PAGES} has no keys and values to copy"));
        let short = backend.import_page(PageId(4), &vec![0; bytes - 4]).unwrap_err();
        assert_eq!(short.to_string(), format!("{} bytes were given for a page of {bytes}", bytes - 4));
        // Every bit pattern survives, NaN payloads included.
        let mut random = fastrand::Rng::with_seed(4);
        let page: Vec<u8> = (0..bytes).map(|_| random.u8(..)).collect();
        backend.import_page(PageId(4), &page).unwrap();
        assert!(export(&*backend, PageId(4)).unwrap() == page, "{}", backend.describe());
    }
}
