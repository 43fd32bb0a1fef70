//! Promise: a kernel that touches a wrong address ends in one line that says so. Alone in its file,
//! because it costs the process its context. Without a GPU, it passes without testing anything.

use talon::cuda::{Arg, Device, Launch, Module, Stream};

#[test]
fn a_wrong_address_is_reported_as_a_kernel_fault() {
    if Device::count().expect("a driver that starts") == 0 {
        return;
    }
    let device = Device::open(0).expect("the first GPU");
    let stream = Stream::new(&device).expect("a stream");
    let kernels = include_bytes!("fixtures/cuda/driver.fatbin");
    let module = Module::load(&device, "driver", kernels).expect("a module");
    let kernel = module.kernel("add_one").expect("a kernel");
    let launch = Launch { grid: [1, 1, 1], block: 1, shared_bytes: 0, dependent: false };
    stream.launch(&kernel, launch, &[Arg::from(4096_u64)]).expect("a launch");
    let text = stream.synchronize().expect_err("a fault").to_string();
    println!("{text}");
    assert!(text.starts_with("kernel fault: "), "{text}");
    assert!(text.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{text}");
}
