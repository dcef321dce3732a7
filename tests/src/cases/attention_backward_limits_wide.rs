//! What the backward kernels of wide heads refuse to be launched with: rows of gradients that are no whole vectors. What is not there is not read.

use oxtile::tensor::{SequenceRows, TensorMap};
use oxtile::{Buffer, Runtime};
use oxtile_kernels::attention::{
    AttentionBackwardWideKeys, AttentionBackwardWideKeysArgs, AttentionBackwardWideQueries, AttentionBackwardWideQueriesArgs, FAR, Heads,
    KeySumsArgument, QueryStatisticsArgument, QueryTargetArgument, WIDE_ROWS, WideKeyTargetArgument, WideOrderArgument,
    WideTensorsArgument, Window,
};
use oxtile_tile::launch::DeviceView;
use oxtile_tile::layout::Swizzle128;
use oxtile_tile::num::bf16;

use super::attention_limits::{LATE, refuses, sequences};
use crate::case::{Case, Outcome, Size, stream, text};

pub fn cases() -> Vec<Case> {
    vec![Case::new("attention_backward_wide::refused::arguments", Size::Small, sizes)]
}

/// Packed: two sequences of two queries and two keys, two heads of 16 elements.
const SEQUENCES: SequenceRows = SequenceRows { rows: 4, row: 32, heads: 2, head: 16, size: 16 };
/// Rows of all heads.
const ROWS: u64 = 4 * 2;

fn sizes(runtime: &Runtime) -> Outcome {
    let stream = stream(runtime)?;
    let of_keys = text(runtime.load::<AttentionBackwardWideKeys<bf16, 192, 128, 96, 12>>())?;
    let of_queries = text(runtime.load::<AttentionBackwardWideQueries<bf16, 192, 128, 96>>())?;
    let tensor = text(Buffer::<bf16>::zeros(&stream, ROWS * 16))?;
    let fixed = text(TensorMap::<_, WIDE_ROWS, 192, Swizzle128, 5>::sequences(&stream, tensor.view(), SEQUENCES))?;
    let fixed_values = text(TensorMap::<_, WIDE_ROWS, 128, Swizzle128, 5>::sequences(&stream, tensor.view(), SEQUENCES))?;
    let passing = text(TensorMap::<_, 96, 192, Swizzle128, 5>::sequences(&stream, tensor.view(), SEQUENCES))?;
    let passing_values = text(TensorMap::<_, 96, 128, Swizzle128, 5>::sequences(&stream, tensor.view(), SEQUENCES))?;
    let (statistics, ends) = (text(Buffer::<f32>::zeros(&stream, ROWS))?, text(Buffer::from_slice(&stream, &[0_u32, 2, 4]))?);
    let late = text(Buffer::from_slice(&stream, &LATE))?;
    let (mut sum, mut value_sum) = (text(Buffer::<f32>::zeros(&stream, ROWS * 16))?, text(Buffer::<f32>::zeros(&stream, ROWS * 16))?);
    let mut counter = text(Buffer::<u32>::zeros(&stream, 1))?;
    let mut launch_of = |(ends, rows): (DeviceView<'_, u32>, u32), keys: bool, [size, value_size]: [u32; 2]| {
        let (mut sum, mut value_sum) = (sum.view_mut(), value_sum.view_mut());
        let (sum, value_sum) = (sum.slice_mut(0, ROWS * u64::from(size)), value_sum.slice_mut(0, ROWS * u64::from(value_size)));
        let order = WideOrderArgument { counter: counter.view_mut(), section_rows: 4 };
        macro_rules! tensors {
            ($q:ident, $grad_out:ident, $k:ident, $v:ident) => {
                WideTensorsArgument {
                    q: $q.view(),
                    grad_out: $grad_out.view(),
                    k: $k.view(),
                    v: $v.view(),
                    statistics: QueryStatisticsArgument { log_sum_exp: statistics.view(), deltas: statistics.view(), rows },
                    sequences: sequences(ends),
                    heads: Heads { batches: 2, heads: 2, group: 1, step: 0 },
                    window: Window { left: FAR, right: FAR, top_left: false },
                    scale: 1.0,
                }
            };
        }
        if keys {
            let added = Some(KeySumsArgument { k: sum, v: value_sum, size, value_size });
            let target = WideKeyTargetArgument { rounded: None, added, scale: 1.0 };
            let tensors = tensors!(passing, passing_values, fixed, fixed_values);
            return of_keys.launch(&stream, AttentionBackwardWideKeysArgs { tensors, target, order });
        }
        let target = QueryTargetArgument { rounded: None, added: Some(sum), size, scale: 1.0 };
        let tensors = tensors!(fixed, fixed_values, passing, passing_values);
        of_queries.launch(&stream, AttentionBackwardWideQueriesArgs { tensors, target, order })
    };
    for keys in [true, false] {
        text(launch_of((ends.view(), 0), keys, [16, 16]))?;
        text(launch_of((late.view(), 2), keys, [16, 16]))?;
        text(stream.synchronize())?;
    }
    let mut launch = |keys: bool, size: u32, value_size: u32| launch_of((ends.view(), 0), keys, [size, value_size]);
    refuses("target.added.k", launch(true, 12, 16))?;
    refuses("target.added.v", launch(true, 16, 12))?;
    refuses("target.size", launch(false, 12, 16))
}
