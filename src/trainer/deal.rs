//! Which rank takes which sequences.

/// Sequences dealt to ranks. It depends on their lengths, their order and the number of ranks.
#[derive(Debug)]
pub(super) struct Deal {
    /// Indices into the caller's list, ascending.
    of_rank: Vec<Vec<usize>>,
}

impl Deal {
    /// Each in turn to the rank that has the fewest tokens so far, the first of several.
    pub(super) fn new(lens: impl IntoIterator<Item = usize>, ranks: usize) -> Self {
        let mut of_rank = vec![Vec::new(); ranks];
        let mut tokens = vec![0; ranks];
        for (index, len) in lens.into_iter().enumerate() {
            let least = (0..ranks).min_by_key(|&rank| tokens[rank]).expect("there is a rank");
            tokens[least] += len;
            of_rank[least].push(index);
        }
        Self { of_rank }
    }

    /// Indices into the caller's list, for each rank.
    pub(super) fn of_ranks(&self) -> &[Vec<usize>] {
        &self.of_rank
    }

    /// Each rank's own of a list.
    pub(super) fn parts<T: Clone>(&self, all: &[T]) -> Vec<Vec<T>> {
        let part = |own: &Vec<usize>| own.iter().map(|&index| all[index].clone()).collect();
        self.of_rank.iter().map(part).collect()
    }

    /// From each rank's results, in its own order, those of the caller's list.
    pub(super) fn gathered<T>(&self, parts: Vec<Vec<T>>) -> Vec<T> {
        let mut all: Vec<Option<T>> = Vec::new();
        all.resize_with(self.of_rank.iter().map(Vec::len).sum(), || None);
        for (own, part) in self.of_rank.iter().zip(parts) {
            assert_eq!(own.len(), part.len(), "one result a sequence");
            own.iter().zip(part).for_each(|(&index, one)| all[index] = Some(one));
        }
        all.into_iter().map(|one| one.expect("every sequence was dealt")).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_sequence_is_dealt_once_and_loads_are_even() {
        let lens = [9, 1, 1, 1, 7, 2, 2, 5, 5, 3];
        for ranks in [1, 2, 3, 4, 8, 12] {
            let deal = Deal::new(lens, ranks);
            let all: Vec<usize> = (0..lens.len()).collect();
            let parts = deal.parts(&all);
            assert_eq!(parts, deal.of_ranks());
            let loads = parts.iter().map(|own| own.iter().map(|&i| lens[i]).sum::<usize>());
            let (least, most) = (loads.clone().min().unwrap(), loads.max().unwrap());
            assert!(most - least <= 9, "{ranks}: {parts:?}");
            assert_eq!(deal.gathered(parts), all);
        }
        assert!(Deal::new([], 2).gathered::<u8>(vec![Vec::new(); 2]).is_empty());
    }
}
