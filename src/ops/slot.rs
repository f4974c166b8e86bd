//! Slot × stride, the one product whose width is a knob (vLLM #35275).

/// Element offset of a slot's state: the product taken modulo 2^`bits`. 64 is the right width; 32
/// is what the selective scan shipped with until vLLM #35275, and what wraps past four billion.
#[must_use]
pub fn state_offset(slot: u64, stride: u64, bits: u32) -> u64 {
    let product = slot.checked_mul(stride).expect("slot x stride fits in 64 bits");
    if bits >= 64 {
        product
    } else {
        product & ((1 << bits) - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn k01_wraps_from_the_first_slot_past_the_width() {
        // (bits, stride, slots, first bad slot, where it lands, how many are bad)
        let cases = [
            (16, 128, 700, 512, 0, 188),
            (16, 96, 700, 683, 32, 17),
            (32, 89_600, 50_000, 47_935, 8_704, 2_065),
            (32, 90_112, 69_471, 47_663, 40_960, 21_808),
            (32, 98_304, 50_000, 43_691, 32_768, 6_309),
            (22, 3_072, 1_441, 1_366, 2_048, 75),
        ];
        for (bits, stride, slots, first, lands, bad) in cases {
            let wraps = |&slot: &u64| state_offset(slot, stride, bits) != slot * stride;
            let wrapped: Vec<u64> = (0..slots).filter(wraps).collect();
            assert_eq!(wrapped.first(), Some(&first), "{bits} bits, stride {stride}");
            assert_eq!(wrapped.len(), bad, "{bits} bits, stride {stride}");
            assert_eq!(state_offset(first, stride, bits), lands, "{bits} bits, stride {stride}");
            assert_eq!(state_offset(first, stride, 64), first * stride);
        }
    }

    #[test]
    fn k01_a_power_of_two_stride_lands_whole_slots_below() {
        for slot in 512..700 {
            assert_eq!(state_offset(slot, 128, 16), (slot - 512) * 128);
        }
    }

    /// A stride that does not divide the width: one store is into two slots.
    #[test]
    fn k01_one_wrapped_store_damages_two_slots() {
        let (stride, lands) = (96, state_offset(683, 96, 16));
        assert_eq!((lands / stride, lands.div_ceil(stride)), (0, 1));
    }

    #[test]
    fn agrees_with_a_32_bit_product() {
        for (slot, stride) in [(47_663_u32, 90_112_u32), (u32::MAX, u32::MAX), (0, 7)] {
            let product = u64::from(slot.wrapping_mul(stride));
            assert_eq!(state_offset(u64::from(slot), u64::from(stride), 32), product);
        }
    }
}
