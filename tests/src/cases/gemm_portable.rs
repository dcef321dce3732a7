//! Matrix multiplication on `mma.sync` against f64: bit for bit where every sum is exact, within a bound elsewhere.

use oxtile::{Buffer, Runtime};
use oxtile_kernels::gemm::{FusionArgument, GemmPortable, GemmPortableArgs, OperandRowsArgument, Shape};
use oxtile_tests::oracle::gemm::Problem;
use oxtile_tile::num::{bf16, f16};

use super::attention_limits::refuses;
use super::gemm::{Division, Job, Operands, Output, check, layout};
use crate::case::{Case, Outcome, Size, stream, text};

const LAYOUTS: [[bool; 2]; 4] = [[false, false], [false, true], [true, false], [true, true]];
/// A part of a tile; tiles that are not whole, and a step that is not; a part of a stage, and fewer steps than stages; an empty sum.
const ALIGNED: [[usize; 3]; 4] = [[8, 8, 16], [264, 136, 200], [16, 24, 8], [8, 16, 0]];
/// Several tiles for each block of the emulator, of one step and of more than there are stages.
const MANY: [[usize; 3]; 2] = [[520, 264, 8], [776, 264, 168]];
/// Rows of which not all start at multiples of 16 bytes; a result of odd rows; one element; an empty sum.
const UNALIGNED: [[usize; 3]; 5] = [[9, 35, 13], [258, 130, 70], [17, 3, 0], [1, 1, 1], [12, 20, 44]];
/// More tiles than a GPU has multiprocessors.
const WAVES: [usize; 3] = [2056, 2576, 136];

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for transposed in LAYOUTS {
        of_layout::<bf16, bf16>(&mut cases, "bf16", transposed);
    }
    of_layout::<bf16, f32>(&mut cases, "bf16_f32", [false, true]);
    of_layout::<f16, f32>(&mut cases, "f16_f32", [true, true]);
    of_layout::<f16, f16>(&mut cases, "f16", [true, false]);
    for (shape, transposed) in MANY.into_iter().zip([[false, true], [true, false]]) {
        exact::<bf16, bf16>(&mut cases, "bf16", Problem { shape, transposed, alpha: 1.0, beta: 0.0, gelu: false }, Size::Small);
    }
    exact::<bf16, bf16>(
        &mut cases,
        "bf16",
        Problem { shape: WAVES, transposed: [false, true], alpha: 1.0, beta: 0.0, gelu: false },
        Size::Waves,
    );
    cases.push(Case::new("gemm_portable::refused", Size::Small, refused));
    cases
}

fn of_layout<T: Operands<O>, O: Output>(cases: &mut Vec<Case>, name: &str, transposed: [bool; 2]) {
    let problem = Problem { shape: [264, 136, 88], transposed, alpha: 0.5, beta: -2.0, gelu: false };
    for shape in ALIGNED.into_iter().chain(UNALIGNED) {
        exact::<T, O>(cases, name, Problem { shape, ..problem }, Size::Small);
    }
    let layout = layout(transposed);
    for (shape, size) in [([24, 40, 88], Size::Small), ([23, 41, 87], Size::Small), ([256, 512, 512], Size::Large)] {
        let problem = Problem { shape, alpha: 0.1, beta: 0.3, gelu: true, ..problem };
        cases.push(Case::new(format!("gemm_portable::{name}::{layout}::normal::{}", shape[0]), size, move |r| {
            check::<T, O>(r, &Job { problem, bias: true, exact: false, division: Division::Portable })
        }));
    }
}

fn exact<T: Operands<O>, O: Output>(cases: &mut Vec<Case>, name: &str, problem: Problem, size: Size) {
    let ([m, n, k], layout) = (problem.shape, layout(problem.transposed));
    cases.push(Case::new(format!("gemm_portable::{name}::{layout}::{m}x{n}x{k}"), size, move |r| {
        check::<T, O>(r, &Job { problem, bias: problem.beta != 0.0, exact: true, division: Division::Portable })
    }));
}

/// What does not lie as the kernel for aligned rows takes it.
fn refused(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let kernel = text(runtime.load::<GemmPortable<bf16, f32, true>>())?;
    let (values, mut d) = (text(Buffer::<bf16>::zeros(&stream, 130))?, text(Buffer::<f32>::zeros(&stream, 66))?);
    let mut launch = |[m, n, k]: [u32; 3], start: [u64; 3]| {
        let rows = |start| OperandRowsArgument { values: values.view().slice(start, start + 64), along_k: true };
        let fusion = FusionArgument { bias: None, a_scale: None, b_scale: None, alpha: 1.0, beta: 0.0, gelu: false };
        let mut d = d.view_mut();
        let d = d.slice_mut(start[2], start[2] + 64);
        kernel.launch(&stream, GemmPortableArgs { a: rows(start[0]), b: rows(start[1]), d, shape: Shape { m, n, k }, fusion })
    };
    text(launch([8, 8, 8], [8, 16, 2]))?;
    refuses("a.values", launch([8, 8, 8], [1, 0, 0]))?;
    refuses("b.values", launch([8, 8, 8], [0, 4, 0]))?;
    refuses("d", launch([8, 8, 8], [0, 0, 1]))?;
    refuses("a.values", launch([16, 16, 4], [0, 0, 0]))?;
    refuses("a.values", launch([4, 8, 8], [0, 0, 0]))?;
    refuses("b.values", launch([8, 4, 8], [0, 0, 0]))
}
