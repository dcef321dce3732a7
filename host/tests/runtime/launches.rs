//! Launches: what is checked before anything is enqueued.

use oxtile::kernels::copy::{CopyWords, CopyWordsArgs};
use oxtile::{Buffer, Error, Runtime};

use crate::support::{Copier, emulated, filled, runtime, stream};

fn refusal(runtime: &Runtime, launch: impl FnOnce(&Copier) -> oxtile::Result<()>) -> String {
    launch(&Copier::new(runtime)).unwrap_err().to_string()
}

#[test]
fn arguments_that_do_not_fit_are_named() {
    let runtime = runtime();
    let stream = stream(&runtime);
    let (source, numbers) = filled(&stream, 64, 1);
    let mut target = Buffer::<u32>::zeros(&stream, 63).unwrap();
    let text = refusal(&runtime, |copier| copier.copy(&stream, &source, &mut target));
    assert_eq!(text, "kernel `copy_words`: `target` has 63 elements; the other arguments ask for 64");
    let kernel = runtime.load::<CopyWords>().unwrap();
    let args = CopyWordsArgs { source: source.view().slice(1, 64), target: target.view_mut() };
    let error = kernel.launch(&stream, args).unwrap_err();
    assert!(matches!(error, Error::Argument { kernel: "copy_words", .. }), "{error}");
    assert!(error.to_string().contains("`source` starts at 0x"), "{error}");
    assert_eq!(source.to_vec(&stream).unwrap(), numbers, "the stream still works");
}

#[test]
fn memory_of_elsewhere_is_refused() {
    let (here, there) = (emulated(0, 2), emulated(0, 2));
    let (near, far, foreign) = (stream(&here), here.device(1).unwrap().stream().unwrap(), stream(&there));
    let source = Buffer::<u32>::zeros(&near, 8).unwrap();
    let mut on_far = Buffer::<u32>::zeros(&far, 8).unwrap();
    let mut on_foreign = Buffer::<u32>::zeros(&foreign, 8).unwrap();
    let text = refusal(&here, |copier| copier.copy(&near, &source, &mut on_far));
    assert!(text.starts_with("kernel `copy_words`, `target`: buffer `buffer` is on device 1, the stream on device 0"), "{text}");
    let text = refusal(&here, |copier| copier.copy(&near, &source, &mut on_foreign));
    assert!(text.starts_with("kernel `copy_words`: `target` was not lent by the runtime of the stream"), "{text}");
    let text = refusal(&there, |copier| copier.copy(&near, &source, &mut on_foreign));
    assert!(text.starts_with("Loaded::launch: the operands belong to different runtimes"), "{text}");
}

#[test]
fn devices_are_numbered_from_zero() {
    let runtime = emulated(0, 2);
    assert_eq!(runtime.device(2).unwrap_err().to_string(), "there is no device 2: this runtime has 2, numbered from 0");
    assert_eq!(runtime.device(1).unwrap().index(), 1);
    assert_eq!(runtime.device(0).unwrap().capability(), (9, 0));
}
