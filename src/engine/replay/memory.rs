//! Who stored the bytes of the pool's pages last, in place of the bytes.
//!
//! A page is a short list of stretches: a few where its owner alone has stored, some more where an
//! address wrapped into it. Offsets and lengths are in bytes.

use std::ops::Range;

use crate::base::{BlockId, GroupId};

/// One life of one request; its number in the order of the lives' first rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LifeId(u32);

impl LifeId {
    pub fn new(index: usize) -> Self {
        Self(u32::try_from(index).expect("fewer than 2^32 lives"))
    }

    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a cache is computed from. Equal contents are equal bytes, but for what rounding may do in
/// fast numerics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// The first tokens of a prompt, as a hash that grows token by token. Rollouts of one prompt
    /// have it in common.
    Prompt(u64),
    /// Sampled tokens too, or bytes that were not the request's own: no other life has the same.
    Life(LifeId),
}

/// What a stretch of bytes must hold to be right: whose layer's cache of what, and lying where.
/// Buffer and group together name the layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes {
    pub content: Content,
    pub group: GroupId,
    /// Where a page begins that has these bytes at their offsets: the page of the block, or, for
    /// bytes at a wrapped address, the place that the wrap makes of it.
    pub page_start: u64,
}

/// Bytes, who stored them, and for which block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    pub bytes: Bytes,
    pub life: LifeId,
    pub block: BlockId,
}

/// What lies where other bytes should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// Never stored to since the start.
    Zeros,
    Stored(Stored),
}

/// All pages of all raw buffers.
#[derive(Clone, Debug)]
pub struct Memory {
    page_bytes: u64,
    /// `[buffers][num_blocks]`
    pages: Vec<Vec<Page>>,
}

/// Ascending, disjoint, no two neighbours alike; what is between them was never stored to.
#[derive(Clone, Debug, Default)]
struct Page(Vec<Stretch>);

/// Offsets are from the page's start.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    start: u64,
    end: u64,
    stored: Stored,
}

impl Memory {
    /// Zeros.
    pub fn new(buffers: usize, num_blocks: u32, page_bytes: u64) -> Self {
        Self { page_bytes, pages: vec![vec![Page::default(); num_blocks as usize]; buffers] }
    }

    /// Zeros again.
    pub fn clear(&mut self) {
        self.pages.iter_mut().flatten().for_each(|page| page.0.clear());
    }

    /// The pages that some bytes of a buffer lie on.
    pub fn pages(&self, bytes: &Range<u64>) -> impl Iterator<Item = BlockId> {
        let pages = bytes.start / self.page_bytes..bytes.end.div_ceil(self.page_bytes);
        pages.map(|page| BlockId::new(u32::try_from(page).expect("a page of the pool")))
    }

    /// The bytes' part on a page, from the page's start.
    fn part(&self, bytes: &Range<u64>, page: BlockId) -> Range<u64> {
        let start = u64::from(page.get()) * self.page_bytes;
        bytes.start.max(start) - start..bytes.end.min(start + self.page_bytes) - start
    }

    pub fn store(&mut self, buffer: usize, bytes: &Range<u64>, stored: Stored) {
        for page in self.pages(bytes) {
            let part = self.part(bytes, page);
            self.pages[buffer][page.index()].store(part, stored);
        }
    }

    /// `None` if every one of the bytes is as expected, which is zeros where nothing is. Else what
    /// is there instead: the first that somebody stored, or zeros if there is nothing but them.
    pub fn misread(
        &self,
        buffer: usize,
        bytes: &Range<u64>,
        expected: Option<Bytes>,
    ) -> Option<Found> {
        let mut found = None;
        for page in self.pages(bytes) {
            match self.pages[buffer][page.index()].misread(self.part(bytes, page), expected) {
                None => {}
                Some(Found::Zeros) => found = Some(Found::Zeros),
                stored => return stored,
            }
        }
        found
    }
}

impl Page {
    fn store(&mut self, bytes: Range<u64>, stored: Stored) {
        let Range { start, end } = bytes;
        // Those that overlap it or touch it.
        let from = self.0.partition_point(|one| one.end < start);
        let len = self.0[from..].iter().take_while(|one| one.start <= end).count();
        if let [one] = &mut self.0[from..from + len] {
            if one.stored == stored {
                (one.start, one.end) = (one.start.min(start), one.end.max(end));
                return;
            }
        }
        let mut new = Stretch { start, end, stored };
        let (mut before, mut after) = (None, None);
        if len > 0 {
            let (first, last) = (self.0[from], self.0[from + len - 1]);
            if first.start < start && first.stored == stored {
                new.start = first.start;
            } else if first.start < start {
                before = Some(Stretch { end: start, ..first });
            }
            if last.end > end && last.stored == stored {
                new.end = last.end;
            } else if last.end > end {
                after = Some(Stretch { start: end, ..last });
            }
        }
        self.0.splice(from..from + len, before.into_iter().chain([new]).chain(after));
    }

    fn misread(&self, bytes: Range<u64>, expected: Option<Bytes>) -> Option<Found> {
        let mut right = 0;
        for one in self.0.iter().filter(|one| one.start < bytes.end && bytes.start < one.end) {
            if Some(one.stored.bytes) != expected {
                return Some(Found::Stored(one.stored));
            }
            right += one.end.min(bytes.end) - one.start.max(bytes.start);
        }
        let is_right = expected.is_none() || right == bytes.end - bytes.start;
        (!is_right).then_some(Found::Zeros)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::Stream;

    const PAGE_BYTES: u64 = 8;

    /// By life `life`, for a block of the same number.
    fn stored(life: u32) -> Stored {
        let content = Content::Life(LifeId(life));
        let bytes = Bytes { content, group: GroupId::new(0), page_start: 0 };
        Stored { bytes, life: LifeId(life), block: BlockId::new(life) }
    }

    /// Stores of (bytes, life), then what a read of some bytes of a life's own, or of zeros, finds.
    #[test]
    fn a_read_finds_its_own_bytes_or_says_what_it_found() {
        let (zeros, by) = (Some(Found::Zeros), |life| Some(Found::Stored(stored(life))));
        type Case = (&'static [(Range<u64>, u32)], Range<u64>, Option<u32>, Option<Found>);
        let cases: &[Case] = &[
            (&[], 0..8, None, None),
            (&[], 0..8, Some(1), zeros),
            (&[(0..8, 1)], 0..8, Some(1), None),
            (&[(0..8, 1)], 2..5, Some(1), None),
            (&[(0..8, 1)], 0..8, None, by(1)),
            (&[(2..8, 1)], 0..8, Some(1), zeros),
            (&[(2..8, 1)], 0..2, None, None),
            (&[(0..8, 1), (3..4, 2)], 0..8, Some(1), by(2)),
            (&[(0..8, 1), (3..4, 2)], 4..8, Some(1), None),
            (&[(0..8, 1), (3..4, 2), (2..5, 1)], 0..8, Some(1), None),
            // Over two pages, and over three.
            (&[(6..10, 1)], 6..10, Some(1), None),
            (&[(6..10, 1), (7..9, 2)], 9..10, Some(1), None),
            (&[(6..10, 1), (9..10, 2)], 6..10, Some(1), by(2)),
            (&[(4..20, 1)], 4..20, Some(1), None),
            (&[(4..20, 1)], 4..21, Some(1), zeros),
            // What somebody stored tells more than zeros do.
            (&[(10..11, 2)], 0..16, Some(1), by(2)),
        ];
        for (stores, read, own, expected) in cases {
            let mut memory = Memory::new(1, 4, PAGE_BYTES);
            for (bytes, life) in *stores {
                memory.store(0, bytes, stored(*life));
            }
            let own = own.map(|life| stored(life).bytes);
            assert_eq!(memory.misread(0, read, own), *expected, "{stores:?}, then {read:?}");
        }
    }

    /// One entry a byte says the same as stretches do, and neighbours that are alike are one.
    #[test]
    fn stretches_agree_with_bytes() {
        let mut stream = Stream::new(7, "memory", 0);
        for _ in 0..200 {
            let mut memory = Memory::new(1, 3, PAGE_BYTES);
            let mut bytes: [Option<Stored>; 24] = [None; 24];
            for _ in 0..stream.integer(1, 24) {
                let start = stream.integer(0, 23);
                let range = start..stream.integer(start + 1, 24);
                let one = stored(stream.integer(1, 3) as u32);
                memory.store(0, &range, one);
                bytes[range.start as usize..range.end as usize].fill(Some(one));
                for at in 0..24 {
                    let found = memory.misread(0, &(at..at + 1), None);
                    assert_eq!(found, bytes[at as usize].map(Found::Stored), "byte {at}");
                }
                for Page(page) in &memory.pages[0] {
                    let merged = |two: &[Stretch]| {
                        two[0].end < two[1].start
                            || (two[0].end == two[1].start && two[0].stored != two[1].stored)
                    };
                    assert!(page.windows(2).all(merged), "{page:?}");
                    assert!(page.iter().all(|one| one.start < one.end), "{page:?}");
                }
            }
        }
    }
}
