//! Headers of safetensors: what is taken, the reference implementation takes with the same content, and an error is one line without escapes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use oxtile_cli::safetensors::Header;
use safetensors::SafeTensors;

// The input is the JSON of a header and, after the first byte 0, the bytes of the data.
fuzz_target!(|input: &[u8]| {
    let end = input.iter().position(|&byte| byte == 0).unwrap_or(input.len());
    let (text, data) = (&input[..end], input.get(end + 1..).unwrap_or_default());
    let ours = match Header::parse(text, data.len() as u64) {
        Ok(header) => header,
        Err(fault) => return assert!(!fault.to_string().contains(char::is_control), "{fault}"),
    };
    let file = [&(text.len() as u64).to_le_bytes()[..], text, data].concat();
    let theirs = SafeTensors::deserialize(&file).expect("the reference takes what is taken here");
    assert_eq!(ours.tensors.len(), theirs.len());
    for tensor in &ours.tensors {
        let view = theirs.tensor(&tensor.name).expect("a tensor of the same name");
        assert_eq!(view.dtype().to_string(), tensor.dtype.to_string());
        assert!(view.shape().iter().map(|&size| size as u64).eq(tensor.shape.iter().copied()), "{tensor:?}");
        assert_eq!(view.data(), &data[tensor.range.start as usize..tensor.range.end as usize], "{tensor:?}");
    }
});
