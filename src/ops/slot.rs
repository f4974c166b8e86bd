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
