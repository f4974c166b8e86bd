//! Pages on the device.

use gapscope::ops::cuda::DeviceError;
use gapscope::ops::pages::cuda::Pages;

use crate::sequences::{gpu, Report};

#[test]
fn pages_begin_as_zeros_and_keep_what_is_put_in() {
    let Some(gpu) = gpu() else { return };
    let mut report = Report::default();
    let (num_blocks, page_bytes) = (7, 12);
    let all = 84;
    let mut pages = Pages::new(&gpu, 2, num_blocks, page_bytes);
    assert_eq!(pages.buffer_bytes(), all);
    for buffer in 0..2 {
        let found = pages.download(buffer, 0..all);
        report.same_bytes(|| format!("buffer {buffer} at first"), &found, &[0; 84]);
    }
    let bytes: Vec<u8> = (1..=20).collect();
    pages.upload(1, 30, &bytes);
    report.same_bytes(|| "put in".into(), &pages.download(1, 30..50), &bytes);
    report.same_bytes(|| "before it".into(), &pages.download(1, 0..30), &[0; 30]);
    report.same_bytes(|| "after it".into(), &pages.download(1, 50..84), &[0; 34]);
    report.same_bytes(|| "beside it".into(), &pages.download(0, 0..all), &[0; 84]);
    report.finish("pages");
}

#[test]
fn a_pool_larger_than_the_device_does_not_fit_and_says_its_numbers() {
    let Some(gpu) = gpu() else { return };
    let (_, total) = gpu.memory();
    let pages = u32::try_from(total / (1 << 20) + 1).expect("a device of less than 4 PiB");
    assert!(!Pages::fit(&gpu, 1, pages, 1 << 20), "more than the device has");
    assert!(!Pages::fit(&gpu, 2, u32::MAX, u64::MAX), "a size past 64 bits");
    let new = std::panic::AssertUnwindSafe(|| Pages::new(&gpu, 1, pages, 1 << 20));
    let panic = std::panic::catch_unwind(new).expect_err("more than the device has");
    let error = panic.downcast_ref::<DeviceError>().expect("a typed payload").to_string();
    let asked = (u64::from(pages) << 20).to_string();
    assert!(error.contains(&asked), "{error} does not say {asked}");
}

#[test]
fn an_address_past_the_buffer_is_loud() {
    let Some(gpu) = gpu() else { return };
    let pages = Pages::new(&gpu, 1, 7, 12);
    let read = || pages.download(0, 80..88);
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(read)).expect_err("past it");
    let message = panic.downcast_ref::<String>().expect("a message");
    assert!(message.contains("of a 84-byte buffer"), "{message}");
}
