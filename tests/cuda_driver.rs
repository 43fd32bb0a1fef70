//! Promise: the layer over the CUDA driver does what it says, on the first GPU of this box. Without a
//! GPU, these tests pass without testing anything.

use std::sync::Arc;

use talon::cuda::{Arg, Device, DeviceMemory, Event, Launch, Module, Pinned, Stream};
use talon::error::Error;

const KERNELS: &[u8] = include_bytes!("fixtures/cuda/driver.fatbin");
const SM_75_ONLY: &[u8] = include_bytes!("fixtures/cuda/sm_75_only.fatbin");

/// The first GPU and a stream; `None` where there is none.
fn first_gpu() -> Option<(Arc<Device>, Stream)> {
    if Device::count().expect("a driver that starts") == 0 {
        return None;
    }
    let device = Device::open(0).expect("the first GPU");
    let stream = Stream::new(&device).expect("a stream");
    Some((device, stream))
}

fn one_block(threads: u32) -> Launch {
    Launch { grid: [1, 1, 1], block: threads, shared_bytes: 0, dependent: false }
}

fn bytes_of(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

fn floats(stream: &Stream, memory: &DeviceMemory) -> Vec<f32> {
    let mut bytes = vec![0; memory.len()];
    stream.download(memory.address(), &mut bytes).expect("a download");
    bytes.chunks_exact(4).map(|b| f32::from_ne_bytes(b.try_into().expect("four"))).collect()
}

#[test]
fn a_device_knows_itself() {
    let Some((device, _)) = first_gpu() else { return };
    println!("{device}, {}, {:?}", device.uuid(), device.compute_capability());
    assert_eq!(device.ordinal(), 0);
    assert!(device.compute_capability().0 >= 7 && device.multiprocessors() > 0);
    assert!(device.l2_bytes() > 0 && device.max_shared_per_block() >= 48 << 10);
    let free = device.free_bytes().expect("free bytes");
    assert!(0 < free && free <= device.total_bytes(), "{free} of {}", device.total_bytes());
    let count = Device::count().expect("a count");
    assert!(Device::open(count).is_err_and(|error| error.exit_code() == 2));
    std::thread::spawn(move || device.make_current()).join().expect("no panic").expect("current");
}

#[test]
fn bytes_travel() {
    let Some((device, stream)) = first_gpu() else { return };
    let memory = DeviceMemory::alloc(&device, 1000).expect("memory");
    let mut pinned = Pinned::alloc(&device, 64).expect("page-locked memory");
    assert_eq!(pinned.as_slice(), [0; 64]);

    stream.fill(memory.address(), 7, 1000).expect("a fill");
    pinned.as_mut_slice()[8..16].copy_from_slice(b"to there");
    stream.copy_to_device(memory.address() + 100, &pinned, 8..16).expect("a copy");
    stream.synchronize().expect("an end");
    stream.copy_from_device(&mut pinned, 40..52, memory.address() + 98).expect("a copy");
    stream.synchronize().expect("an end");
    assert_eq!(&pinned.as_slice()[40..52], b"\x07\x07to there\x07\x07");

    stream.upload(memory.address(), b"pageable").expect("an upload");
    let mut back = [0; 9];
    stream.download(memory.address(), &mut back).expect("a download");
    assert_eq!(&back, b"pageable\x07");

    let error = stream.copy_to_device(memory.address(), &pinned, 60..65).expect_err("too long");
    assert!(error.to_string().contains("60 to 65"), "{error}");
    let empty = DeviceMemory::alloc(&device, 0).expect("no memory");
    stream.upload(empty.address(), &[]).expect("nothing");
    assert!(empty.is_empty());
}

#[test]
fn memory_that_is_not_there_is_said_in_mib() {
    let Some((device, _)) = first_gpu() else { return };
    let asked = device.total_bytes() + (1 << 20);
    let text = DeviceMemory::alloc(&device, asked).expect_err("too much").to_string();
    println!("{text}");
    assert!(text.starts_with("out of memory: asked for "), "{text}");
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Shape {
    count: u64,
    factor: f32,
    offset: f32,
}

#[test]
fn arguments_reach_the_kernel() {
    let Some((device, stream)) = first_gpu() else { return };
    let module = Module::load(&device, "driver", KERNELS).expect("a module");
    let kernel = module.kernel("scale_add").expect("a kernel");
    drop(module); // the kernel keeps it
    assert_eq!(kernel.parameters(), [16, 8, 8, 4, 4, 4]);
    let (out, input) = (
        DeviceMemory::alloc(&device, 16).expect("memory"),
        DeviceMemory::alloc(&device, 16).expect("memory"),
    );
    stream.fill(out.address(), 0, 16).expect("a fill");
    stream.upload(input.address(), &bytes_of(&[1.0, 2.0, 3.0, 4.0])).expect("an upload");
    let shape = Shape { count: 3, factor: 10.0, offset: 0.5 };
    let good = [
        Arg::of(&shape),
        out.address().into(),
        input.address().into(),
        (-2_i32).into(),
        3_u32.into(),
        0.25_f32.into(),
    ];
    stream.launch(&kernel, one_block(32), &good).expect("a launch");
    assert_eq!(floats(&stream, &out), [-181.25, -171.25, -161.25, 0.0]);

    let mut wrong = good;
    wrong[4] = Arg::from(3_u64);
    let text = |result: Result<(), Error>| result.expect_err("refused").to_string();
    let message = text(stream.launch(&kernel, one_block(32), &wrong));
    assert!(message.starts_with("kernel scale_add, parameter 4: 8 bytes given, 4"), "{message}");
    let message = text(stream.launch(&kernel, one_block(32), &good[..5]));
    assert!(message.starts_with("kernel scale_add, parameter 5: 5 arguments"), "{message}");
    println!("{}", text(stream.launch(&kernel, one_block(2048), &good)));
}

#[test]
fn kernels_are_found_and_described() {
    let Some((device, stream)) = first_gpu() else { return };
    let module = Module::load(&device, "driver", KERNELS).expect("a module");
    let kernel = module.kernel("no_parameters").expect("a kernel");
    assert!(kernel.parameters().is_empty());
    stream.launch(&kernel, one_block(1), &[]).expect("a launch");
    let attributes = kernel.attributes().expect("attributes");
    println!("{attributes:?}");
    assert_eq!((attributes.max_threads, attributes.local_bytes), (1024, 0));
    assert!(kernel.occupancy(1024, 0).expect("occupancy") >= 1);

    let most = device.max_shared_per_block();
    kernel.set_max_shared(most).expect("all shared memory");
    assert_eq!(kernel.occupancy(32, most), Ok(1));
    stream.launch(&kernel, Launch { shared_bytes: most, ..one_block(32) }, &[]).expect("a launch");
    stream.synchronize().expect("an end");
    println!("{}", kernel.set_max_shared(most + 1).expect_err("too much"));
    println!("{}", module.kernel("absent").expect_err("absent"));
}

#[test]
fn modules_for_other_gpus_say_what_they_are_for() {
    let Some((device, _)) = first_gpu() else { return };
    if device.compute_capability().0 != 7 {
        let text = Module::load(&device, "old", SM_75_ONLY).expect_err("another GPU").to_string();
        println!("{text}");
        assert!(text.starts_with("no kernels for this GPU: module old: "), "{text}");
        assert!(text.contains("kernels for sm_75, the GPU is sm_"), "{text}");
    }
    let half = &KERNELS[..KERNELS.len() / 2];
    let text = Module::load(&device, "half", half).expect_err("half a module").to_string();
    assert!(text.contains("not a whole fatbin"), "{text}");
}

#[test]
fn graphs_run_what_was_recorded() {
    let Some((device, stream)) = first_gpu() else { return };
    let module = Module::load(&device, "driver", KERNELS).expect("a module");
    let kernel = module.kernel("add_one").expect("a kernel");
    let memory = DeviceMemory::alloc(&device, 16).expect("memory");
    stream.fill(memory.address(), 0, 16).expect("a fill");
    let dependent = Launch { dependent: true, ..one_block(4) };
    let graph = stream
        .capture(|stream| {
            stream.launch(&kernel, one_block(4), &[memory.address().into()])?;
            stream.launch(&kernel, dependent, &[memory.address().into()])
        })
        .expect("a graph");
    assert_eq!(graph.nodes(), 2);
    assert_eq!(floats(&stream, &memory), [0.0; 4], "recording runs nothing");
    graph.upload(&stream).expect("an upload");
    for _ in 0..5 {
        graph.launch(&stream).expect("a launch");
    }
    assert_eq!(floats(&stream, &memory), [10.0; 4]);
    std::thread::scope(|scope| {
        scope.spawn(|| drop(graph)); // from a thread that has no context yet
    });

    let failed = stream.capture(|stream| {
        stream.launch(&kernel, one_block(4), &[memory.address().into()])?;
        Err(Error::runtime("on purpose"))
    });
    assert_eq!(failed.expect_err("an error").to_string(), "on purpose");
    println!("{}", stream.capture(Stream::synchronize).expect_err("no end while recording"));
    stream.launch(&kernel, dependent, &[memory.address().into()]).expect("a launch");
    assert_eq!(floats(&stream, &memory), [11.0; 4], "the stream is as before");
}

#[test]
fn events_measure_time() {
    let Some((device, stream)) = first_gpu() else { return };
    let memory = DeviceMemory::alloc(&device, 64 << 20).expect("memory");
    let (first, last) = (Event::new(&device).expect("event"), Event::new(&device).expect("event"));
    first.record(&stream).expect("a mark");
    for _ in 0..10 {
        stream.fill(memory.address(), 1, memory.len()).expect("a fill");
    }
    last.record(&stream).expect("a mark");
    last.synchronize().expect("an end");
    let milliseconds = last.milliseconds_since(&first).expect("a time");
    assert!(0.0 < milliseconds && milliseconds < 10_000.0, "{milliseconds} ms");
}
