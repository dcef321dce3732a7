//! What a rank's results have to be: those of the layer on one GPU, by plain products.

use anyhow::{Result, ensure};
use half::bf16 as Half;
use oxtile::gemm::{Activation, Epilogue, Gemm, GemmConfig};
use oxtile::num::bf16;
use oxtile::{Buffer, Runtime, Stream};

use super::products::Shape;

/// What lies between the weights, of some tokens and a rank's part.
struct Between {
    activated: Buffer<bf16>,
    dz: Buffer<bf16>,
    dbias: Buffer<f32>,
}

/// `y` and `dx` of the tokens of rank `me`, and the gradients of its part of `W1`, of the bias and of `W2`. `given` are a rank's tensors.
pub fn results(
    runtime: &Runtime,
    stream: &Stream,
    Shape { tokens, width, hidden }: Shape,
    [me, ranks]: [u32; 2],
    given: impl Fn(u32) -> [Vec<Half>; 5],
) -> Result<[Vec<f32>; 5]> {
    let (own, part) = (tokens / u64::from(ranks), hidden / u64::from(ranks));
    let upload = |values: &[Half]| Buffer::<bf16>::from_slice(stream, values);
    let between = |rows: u64, [x, dy]: [&Buffer<bf16>; 2], [up, bias, down]: [&Buffer<bf16>; 3]| -> Result<Between> {
        let of = |activation| GemmConfig { m: rows, n: part, k: width, activation, ..GemmConfig::default() };
        let matrix = || Buffer::<bf16>::uninitialised(stream, rows * part);
        let (mut z, mut activated, mut dz) = (matrix()?, matrix()?, matrix()?);
        let mut dbias = Buffer::uninitialised(stream, part)?;
        let forward = Gemm::<bf16, bf16>::new(runtime, GemmConfig { transpose_b: true, ..of(Activation::Gelu) })?;
        let keeping = Epilogue { bias: Some(bias.view()), kept: Some(z.view_mut()), ..Epilogue::default() };
        forward.bind_epilogue(stream, (x.view(), up.view()), None, keeping, activated.view_mut())?.run(stream)?;
        let backward = Gemm::<bf16, bf16>::new(runtime, of(Activation::GeluGradient))?;
        let deriving = Epilogue { input: Some(z.view()), bias_gradient: Some(dbias.view_mut()), ..Epilogue::default() };
        backward.bind_epilogue(stream, (dy.view(), down.view()), None, deriving, dz.view_mut())?.run(stream)?;
        Ok(Between { activated, dz, dbias })
    };
    let product = |config: GemmConfig, a: &Buffer<bf16>, b: &Buffer<bf16>| -> Result<Vec<f32>> {
        let mut d = Buffer::<f32>::uninitialised(stream, config.m * config.n)?;
        Gemm::<bf16, f32>::new(runtime, config)?.run(stream, a.view(), b.view(), None, d.view_mut())?;
        Ok(d.to_vec(stream)?)
    };
    let (mut y, mut dx) = (vec![0.0; (own * width) as usize], vec![0.0; (own * width) as usize]);
    let mut gradients = None;
    let all: Vec<_> = (0..ranks).map(given).collect();
    let joined = |tensor: usize| upload(&all.iter().flat_map(|given| given[tensor].iter().copied()).collect::<Vec<_>>());
    for (rank, [.., up, bias, down]) in (0..).zip(&all) {
        let [up, bias, down] = [upload(up)?, upload(bias)?, upload(down)?];
        let weights = [&up, &bias, &down];
        // This rank's tokens need all parts of the weights.
        let [x, dy, ..] = &all[me as usize];
        let Between { activated, dz, .. } = between(own, [&upload(x)?, &upload(dy)?], weights)?;
        let rows = GemmConfig { m: own, n: width, k: part, ..GemmConfig::default() };
        add(&mut y, &product(GemmConfig { transpose_b: true, ..rows }, &activated, &down)?);
        add(&mut dx, &product(rows, &dz, &up)?);
        // Its part of the weights needs all tokens.
        if rank == me {
            let [x, dy] = [joined(0)?, joined(1)?];
            let Between { activated, dz, dbias } = between(tokens, [&x, &dy], weights)?;
            let of = |m, n| GemmConfig { m, n, k: tokens, transpose_a: true, ..GemmConfig::default() };
            let [dup, ddown] = [product(of(part, width), &dz, &x)?, product(of(width, part), &dy, &activated)?];
            gradients = Some([dup, dbias.to_vec(stream)?, ddown]);
        }
    }
    let Some([dup, dbias, ddown]) = gradients else { anyhow::bail!("rank {me} is none of {ranks}") };
    Ok([y, dx, dup, dbias, ddown])
}

fn add(sums: &mut [f32], parts: &[f32]) {
    sums.iter_mut().zip(parts).for_each(|(sum, part)| *sum += part);
}

/// Fails at the first element that is farther from the exact one than roundings to bf16 of parts, and of what goes in, come to: 1 % of it, and 2 % of a usual one.
pub fn check(found: &[f32], exact: &[f32]) -> Result<()> {
    ensure!(found.len() == exact.len(), "{} elements, not {}", found.len(), exact.len());
    let squares: f64 = exact.iter().map(|exact| f64::from(*exact).powi(2)).sum();
    let usual = (squares / exact.len() as f64).sqrt() as f32;
    // NaN is wrong too.
    let is_right = |(found, exact): (&f32, &f32)| (found - exact).abs() <= 0.01 * exact.abs() + 0.02 * usual;
    match found.iter().zip(exact).position(|both| !is_right(both)) {
        Some(at) => anyhow::bail!("element {at} is {}, not {}, where a usual one is {usual}", found[at], exact[at]),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::check;

    #[test]
    fn an_element_that_is_wrong_is_named() {
        check(&[1.0, -1.0, 0.01], &[1.01, -1.0, 0.0]).unwrap();
        let wrong = check(&[1.0, -1.0], &[1.0, 1.0]).unwrap_err().to_string();
        assert_eq!(wrong, "element 1 is -1, not 1, where a usual one is 1");
        assert!(check(&[f32::NAN], &[0.0]).is_err() && check(&[0.0], &[]).is_err());
    }
}
