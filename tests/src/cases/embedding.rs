//! Embedding: rows gathered bit for bit, and their gradients added up against f64.

use std::marker::PhantomData;

use oxtile::{Buffer, Runtime};
use oxtile_kernels::embedding::*;
use oxtile_kernels::row::{ByBlock, ByElements, ByWarp, Split};
use oxtile_tests::inputs::{Random, Scenario};
use oxtile_tile::launch::Kernel;
use oxtile_tile::num::{Half, bf16, f16};

use super::element::{TestElement, comparable_bits, rounded_bits};
use crate::case::{Case, Outcome, Size, agrees, equal, stream, text};

/// Rows of the table.
const VOCABULARY: usize = 11;

pub fn cases() -> Vec<Case> {
    [
        of_split::<bf16, ByWarp<2>>("by_warp", &[[1, 8], [21, 512], [0, 64]]),
        of_split::<f16, ByWarp<2>>("by_warp", &[[9, 136]]),
        of_split::<bf16, ByBlock<128, 2>>("by_block_128", &[[5, 2048], [3, 520]]),
        of_split::<f16, ByBlock<128, 2>>("by_block_128", &[[2, 1032]]),
        of_split::<bf16, ByBlock<256, 4>>("by_block_256", &[[3, 8192]]),
        of_split::<f16, ByBlock<256, 4>>("by_block_256", &[[3, 4096]]),
        of_split::<bf16, ByElements>("by_elements", &[[1, 1], [30, 7], [3, 2049]]),
        of_split::<f16, ByElements>("by_elements", &[[9, 100]]),
        vec![
            Case::new("embedding::bf16::by_block_256::300x4096", Size::Large, |runtime| {
                run::<bf16, ByBlock<256, 4>>(runtime, Scenario::Normal, [300, 4096])
            }),
            Case::new("embedding::bf16::backward::gradient_from_an_odd_element", Size::Small, |runtime| backward::<bf16>(runtime, 1, 0)),
            Case::new("embedding::f16::backward::sums_from_an_odd_element", Size::Small, |runtime| backward::<f16>(runtime, 0, 1)),
            Case::new("embedding::refused", Size::Small, refused),
        ],
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn of_split<T: TestElement + Half, S: Split>(name: &str, shapes: &[[usize; 2]]) -> Vec<Case>
where
    Embedding<T, S>: Kernel,
    EmbeddingBackward<T>: Kernel,
{
    let case = |what: String, scenario, shape| {
        Case::new(format!("embedding::{}::{name}::{what}", T::DTYPE.name()), Size::Small, move |runtime| {
            run::<T, S>(runtime, scenario, shape)
        })
    };
    let mut cases: Vec<_> = shapes.iter().map(|&[rows, width]| case(format!("{rows}x{width}"), Scenario::Normal, [rows, width])).collect();
    cases.push(case("nans".to_owned(), Scenario::Nans, [6, 40]));
    cases
}

fn run<T: TestElement + Half, S: Split>(runtime: &Runtime, scenario: Scenario, [rows, width]: [usize; 2]) -> Outcome
where
    Embedding<T, S>: Kernel,
    EmbeddingBackward<T>: Kernel,
{
    let stream = stream(runtime)?;
    let mut random = Random::new(4);
    // The first and the last row of the table are named.
    let tokens: Vec<u32> =
        (0..rows).map(|i| if i < 2 { i * (VOCABULARY - 1) } else { random.below(VOCABULARY as u64) as usize } as u32).collect();
    let table = scenario.generate(T::DTYPE, VOCABULARY * width, 3);
    let (of_table, of_tokens) = (T::upload(&stream, &table)?, text(Buffer::from_slice(&stream, &tokens))?);
    let mut output = T::upload(&stream, &vec![7.0; rows * width])?;
    let args = EmbeddingArgs {
        table: of_table.view(),
        tokens: of_tokens.view(),
        output: output.view_mut(),
        width: width as u32,
        marker: PhantomData,
    };
    text(text(runtime.load::<Embedding<T, S>>())?.launch(&stream, args))?;
    let row = |token: u32| &table[token as usize * width..][..width];
    let expected: Vec<u32> = tokens.iter().flat_map(|&token| row(token)).map(|&x| rounded_bits::<T>(x)).collect();
    let found: Vec<u32> = text(output.to_vec(&stream))?.into_iter().map(comparable_bits::<T>).collect();
    equal("output", &found, &expected)?;

    let gradients = scenario.generate(T::DTYPE, rows * width, 8);
    let gradient = T::upload(&stream, &gradients)?;
    let before: Vec<f32> = (0..VOCABULARY * width).map(|_| random.normal()).collect();
    let mut sums = text(Buffer::from_slice(&stream, &before))?;
    let args =
        EmbeddingBackwardArgs { gradient: gradient.view(), tokens: of_tokens.view(), table_gradient: sums.view_mut(), width: width as u32 };
    text(text(runtime.load::<EmbeddingBackward<T>>())?.launch(&stream, args))?;
    let sums = text(sums.to_vec(&stream))?;
    let mut expected: Vec<[f64; 2]> = before.iter().map(|&x| [x.into(), x.abs().into()]).collect();
    for (i, token) in tokens.iter().enumerate() {
        for j in 0..width {
            let (sum, x) = (&mut expected[*token as usize * width + j], f64::from(gradients[i * width + j]));
            *sum = [sum[0] + x, sum[1] + x.abs()];
        }
    }
    for (i, (found, [expected, magnitude])) in sums.iter().zip(expected).enumerate() {
        if !agrees((*found).into(), expected, magnitude * 4e-6) {
            return Err(format!("table_gradient[{i}] is {found:e}, expected {expected:e}"));
        }
    }
    Ok(())
}

/// Gradients, and their sums, that do not begin at a multiple of 16 bytes.
fn backward<T: TestElement + Half>(runtime: &Runtime, before_gradient: u64, before_sums: u64) -> Outcome
where
    EmbeddingBackward<T>: Kernel,
{
    let (stream, width, tokens) = (stream(runtime)?, 40, [3_u32, 0, 3]);
    let gradients = Scenario::Normal.generate(T::DTYPE, before_gradient as usize + tokens.len() * width, 8);
    let (gradient, of_tokens) = (T::upload(&stream, &gradients)?, text(Buffer::from_slice(&stream, &tokens))?);
    let mut sums = text(Buffer::<f32>::zeros(&stream, before_sums + 4 * width as u64))?;
    let args = EmbeddingBackwardArgs {
        gradient: gradient.view().slice(before_gradient, before_gradient + (tokens.len() * width) as u64),
        tokens: of_tokens.view(),
        table_gradient: sums.view_mut().split_at(before_sums).1,
        width: width as u32,
    };
    text(text(runtime.load::<EmbeddingBackward<T>>())?.launch(&stream, args))?;
    let mut expected = vec![0.0_f64; before_sums as usize + 4 * width];
    for (i, x) in gradients[before_gradient as usize..].iter().enumerate() {
        expected[before_sums as usize + tokens[i / width] as usize * width + i % width] += f64::from(*x);
    }
    for (i, (found, expected)) in text(sums.to_vec(&stream))?.into_iter().zip(expected).enumerate() {
        if !agrees(found.into(), expected, 1e-5) {
            return Err(format!("table_gradient[{i}] is {found:e}, expected {expected:e}"));
        }
    }
    Ok(())
}

/// What does not fit is named, with what would; a token that the table does not have ends the launch.
fn refused(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let table = text(Buffer::<bf16>::zeros(&stream, 1024))?;
    let kernel = text(runtime.load::<Embedding<bf16, ByWarp<2>>>())?;
    let mut output = text(Buffer::<bf16>::zeros(&stream, 256))?;
    let mut launch = |[start, end]: [u64; 2], tokens: &Buffer<u32>| {
        let (table, output) = (table.view().slice(start, end), output.view_mut().split_at(tokens.len() * 64).0);
        text(kernel.launch(&stream, EmbeddingArgs { table, tokens: tokens.view(), output, width: 64, marker: PhantomData }))
    };
    let tokens = text(Buffer::from_slice(&stream, &[0_u32, 1]))?;
    let refusals = [([1, 129], "`table` starts at"), ([0, 130], "`table` counts 130, which is not a multiple of 64")];
    for (part, expected) in refusals {
        match launch(part, &tokens) {
            Err(error) if error.contains(expected) => {}
            other => return Err(format!("{other:?}, expected `{expected}`")),
        }
    }
    // On a GPU a trap ends the context, of all cases: the emulator's is tried.
    if runtime.kind() == oxtile::Kind::Cuda {
        return Ok(());
    }
    launch([0, 128], &text(Buffer::from_slice(&stream, &[2_u32]))?)?;
    match text(stream.synchronize()) {
        Err(error) if error.contains("trap") => Ok(()),
        other => Err(format!("{other:?}, expected a trap")),
    }
}
