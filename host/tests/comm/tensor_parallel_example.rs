//! The program of the example: a layer whose weights ranks share has the results and gradients of the whole layer in float64.

#[path = "../../examples/tensor_parallel/main.rs"]
pub mod example;

use example::layer::{Shape, Way};
use example::rank::{Run, given};
use example::{Options, by_threads};
use half::bf16;
use oxtile::Runtime;
use oxtile::overlap::Method;

/// The layer on one device, in float64. Tensors are row-major.
struct Whole {
    y: Vec<f64>,
    dx: Vec<f64>,
    dup: Vec<f64>,
    dbias: Vec<f64>,
    ddown: Vec<f64>,
}

/// `[rows, columns]` of so many terms each.
fn product([rows, columns, terms]: [u64; 3], term: impl Fn(usize, usize, usize) -> f64) -> Vec<f64> {
    let places = (0..rows as usize).flat_map(|row| (0..columns as usize).map(move |column| (row, column)));
    places.map(|(row, column)| (0..terms as usize).map(|at| term(row, column, at)).sum()).collect()
}

fn gelu(x: f64) -> f64 {
    x / 2.0 * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh())
}

fn slope(x: f64) -> f64 {
    (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5
}

impl Whole {
    fn new(shape: Shape, ranks: u32) -> Self {
        let Shape { tokens, width, hidden } = shape;
        let parts: Vec<[Vec<bf16>; 5]> = (0..ranks).map(|rank| given(shape, rank, ranks)).collect();
        let joined = |tensor: usize| parts.iter().flat_map(|part| part[tensor].iter().map(|value| value.to_f64())).collect::<Vec<_>>();
        let (x, dy, up, bias) = (joined(0), joined(1), joined(2), joined(3));
        let (w, h, own) = (width as usize, hidden as usize, (hidden / u64::from(ranks)) as usize);
        // Each rank has columns of it.
        let down = |row: usize, column: usize| parts[column / own][4][row * own + column % own].to_f64();
        let z = product([tokens, hidden, width], |t, j, i| x[t * w + i] * up[j * w + i]);
        let z: Vec<f64> = z.iter().enumerate().map(|(at, z)| z + bias[at % h]).collect();
        let y = product([tokens, width, hidden], |t, i, j| gelu(z[t * h + j]) * down(i, j));
        let dz = product([tokens, hidden, width], |t, j, i| dy[t * w + i] * down(i, j));
        let dz: Vec<f64> = dz.iter().zip(&z).map(|(dz, z)| dz * slope(*z)).collect();
        Self {
            y,
            dx: product([tokens, width, hidden], |t, i, j| dz[t * h + j] * up[j * w + i]),
            dup: product([hidden, width, tokens], |j, i, t| dz[t * h + j] * x[t * w + i]),
            dbias: product([1, hidden, tokens], |_, j, t| dz[t * h + j]),
            ddown: product([width, hidden, tokens], |i, j, t| dy[t * w + i] * gelu(z[t * h + j])),
        }
    }
}

/// Within what roundings to bf16 of what goes in come to: 1 % of an element, and of a usual one.
fn check<'a>(what: &str, found: &[f32], exact: impl Iterator<Item = &'a f64> + Clone) {
    let usual = (exact.clone().map(|x| x * x).sum::<f64>() / found.len() as f64).sqrt();
    assert_eq!(found.len(), exact.clone().count(), "{what}");
    for (at, (found, exact)) in found.iter().zip(exact).enumerate() {
        let bound = 0.01 * exact.abs() + 0.02 * usual;
        assert!((f64::from(*found) - exact).abs() <= bound, "{what}[{at}] is {found}, not {exact} within {bound}");
    }
}

#[test]
fn ranks_have_the_layer_of_one_device() {
    let ways = [Way::By(Method::Fused), Way::By(Method::Sequential), Way::Bulk];
    let cases = [(1, Way::Chosen), (1, Way::Bulk), (4, ways[0]), (4, ways[2])];
    for (ranks, way) in ways.map(|way| (2, way)).into_iter().chain(cases) {
        let shape = Shape { tokens: 96, width: 32, hidden: 64 };
        let options = Options { ranks, way, shape, steps: 2 };
        let runs = by_threads(&Runtime::emulated(ranks).unwrap(), &options).unwrap_or_else(|error| panic!("{options:?}: {error}"));
        let (whole, part) = (Whole::new(shape, ranks), |size: u64| (size / u64::from(ranks)) as usize);
        for (rank, run @ Run { y, dx, dup, dbias, ddown, .. }) in runs.iter().enumerate() {
            assert!(run.is_equal, "{options:?}, rank {rank}: {run}");
            let rows = |of: &'static str, found: &[f32], exact: &[f64], rows: usize, width: usize| {
                check(&format!("{of} of rank {rank} of {ranks}"), found, exact[rank * rows * width..(rank + 1) * rows * width].iter());
            };
            let (w, h, own) = (shape.width as usize, shape.hidden as usize, part(shape.hidden));
            rows("y", y, &whole.y, part(shape.tokens), w);
            rows("dx", dx, &whole.dx, part(shape.tokens), w);
            rows("dW1", dup, &whole.dup, own, w);
            rows("db", dbias, &whole.dbias, own, 1);
            let columns = whole.ddown.chunks(h).flat_map(|row| &row[rank * own..(rank + 1) * own]);
            check(&format!("dW2 of rank {rank} of {ranks}"), ddown, columns);
        }
        assert!(runs[0].to_string().ends_with("all steps have the bits of the first one, enqueued and in a graph"), "{}", runs[0]);
    }
}
