//! What `talon doctor --deep` measures a GPU with, here between two places on one GPU.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use talon::cuda::{Meter, Toward, measure_path, measure_together};

use crate::device;

#[test]
fn reads_and_copies_have_a_rate_and_arrive_whole() {
    let Some((_turn, _device)) = device() else { return };
    let mut one = Meter::open(0).expect("a GPU");
    assert!(one.read_rate().expect("it reads") > 0.0);
    for toward in [Toward::Device, Toward::Host] {
        assert!(one.host_rate(toward).expect("it copies") > 0.0, "{toward:?}");
    }
    let other = Meter::open(0).expect("the same GPU");
    // Fails if a byte arrives damaged, or none does.
    let path = measure_path(&one, &other).expect("a way within one GPU");
    assert!(path.copy > 0.0 && path.load > 0.0 && path.store > 0.0, "{path:?}");
    println!("{path:?}");
    for rate in measure_together(&[one, other], 1).expect("both at once") {
        assert!(rate > 0.0);
    }
}

#[test]
fn a_load_ends_when_it_is_told_to() {
    let Some((_turn, _device)) = device() else { return };
    let mut meter = Meter::open(0).expect("a GPU");
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let works = scope.spawn(|| meter.work(&stop));
        std::thread::sleep(Duration::from_millis(300));
        assert!(!works.is_finished());
        stop.store(true, Ordering::Relaxed);
        works.join().expect("no panic").expect("it works");
    });
}
