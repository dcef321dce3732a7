//! `oxtile-benches`: measures, writes raw results and prints tables.

use std::{
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use lexopt::{Arg, Parser, ValueExt};
use oxtile_benches::{
    bench::Size,
    chart, family,
    peers::Peers,
    ranks, render,
    results::Document,
    run::{self, LEAST_ROUNDS, Options, Outcome, Sweep},
    status,
};

const USAGE: &str = "\
Usage: oxtile-benches [FAMILY...] [--only TEXT] [--rounds N] [--json PATH] [--peers FOLDER | --no-peers] [--seed N] [--smoke]
       oxtile-benches attention --sweep [--rounds N] [--json FOLDER] [--peers FOLDER | --no-peers] [--seed N] [--smoke]
       oxtile-benches gemm --sweep | --plans [--rounds N] [--json PATH] [--peers FOLDER | --no-peers] [--seed N] [--smoke]
       oxtile-benches --ranks N [nccl] [symmetric] [exchange] [overlap] [overlap_shapes] [context_parallel]
                       [context_parallel_auto] [sharded]
                       [--only TEXT] [--rounds N] [--json PATH] [--peers FOLDER | --no-peers] [--seed N] [--smoke]
       oxtile-benches --render FILE.json... | --chart FILE.json... | --status

Times the kernels on the GPU, in turn with torch's implementations of the same functions.

  FAMILY          {families};
                  all of them without
  --sweep         attention at 40 shapes of every kind, forward and backward, for a minute at most; products at those of models, for four
  --plans         the same products by several plans among which ours choose
  --only TEXT     only those of the benchmarks whose names, as they are printed, have this text
  --rounds N      rounds of each comparison, at least 30 (40; 30 of a sweep)
  --json PATH     writes the raw results: PATH.json as one file, else as a folder of one file a family
  --peers FOLDER  where server.py is (OXTILE_PEERS, beside this program, benches/peers)
  --no-peers      the kernels alone
  --seed N        of the data and the order of rounds (1)
  --smoke         every benchmark at a tiny size on the CPU emulator, without peers: says that they run, not how fast
  --ranks N       collectives of NCCL, symmetric memory, messages and products of gathered operands among N GPUs instead of kernels, each of
                  them a process of its own, in turn with torch.distributed. `sharded`: weights in shards, pulled and scattered.
                  `overlap_shapes`, the methods of such products at 528 shapes with an eighth of the rounds, and `context_parallel`,
                  attention to a sequence that is spread over them by every schedule, run only where they are named; so does
                  `context_parallel_auto`: over 60 configurations, in which the schedule that it chooses is held against all others
  --render        prints the tables of results files
  --chart         draws results files: FILE.svg beside each. A sweep that writes a folder draws its own
  --status        writes the tables of docs/status.md anew, from the registry of kernels and the results in benches/results

The commit in the results is that of OXTILE_COMMIT or of the file `commit` beside this program.
";

/// Rounds of a comparison, if the command does not give them.
const ROUNDS: usize = 40;

struct Arguments {
    options: Options,
    json: Option<PathBuf>,
    render: Vec<PathBuf>,
    chart: Vec<PathBuf>,
    ranks: Option<u32>,
    status: bool,
}

fn main() -> ExitCode {
    let is_rank = std::env::args().nth(1).is_some_and(|first| first == ranks::FLAG);
    let run = || arguments().and_then(|arguments| arguments.map_or(Ok(()), |arguments| execute(&arguments)));
    match if is_rank { ranks::serve_process() } else { run() } {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The command line; nothing if it asks for help, which is then printed.
fn arguments() -> Result<Option<Arguments>> {
    let options = Options {
        families: Vec::new(),
        sweep: None,
        only: None,
        rounds: ROUNDS,
        size: Size::Full,
        peers: true,
        peers_folder: None,
        seed: 1,
    };
    let mut arguments = Arguments { options, json: None, render: Vec::new(), chart: Vec::new(), ranks: None, status: false };
    let mut rounds = None;
    let options = &mut arguments.options;
    let mut parser = Parser::from_env();
    while let Some(argument) = parser.next()? {
        match argument {
            Arg::Value(family) => options.families.push(family.string()?),
            Arg::Long("only") => options.only = Some(parser.value()?.parse()?),
            Arg::Long("rounds") => rounds = Some(parser.value()?.parse()?),
            Arg::Long("sweep") => options.sweep = Some(Sweep::Shapes),
            Arg::Long("plans") => options.sweep = Some(Sweep::Plans),
            Arg::Long("json") => arguments.json = Some(parser.value()?.into()),
            Arg::Long("peers") => options.peers_folder = Some(parser.value()?.into()),
            Arg::Long("no-peers") => options.peers = false,
            Arg::Long("seed") => options.seed = parser.value()?.parse()?,
            Arg::Long("smoke") => options.size = Size::Smoke,
            Arg::Long("ranks") => arguments.ranks = Some(parser.value()?.parse()?),
            Arg::Long("render") => arguments.render.extend(parser.values()?.map(PathBuf::from)),
            Arg::Long("chart") => arguments.chart.extend(parser.values()?.map(PathBuf::from)),
            Arg::Long("status") => arguments.status = true,
            Arg::Short('h') | Arg::Long("help") => {
                print!("{}", USAGE.replace("{families}", &family::NAMES.join(", ")));
                return Ok(None);
            }
            other => return Err(other.unexpected().into()),
        }
    }
    options.rounds = rounds.unwrap_or(if options.sweep.is_some() { LEAST_ROUNDS } else { ROUNDS });
    options.peers &= options.size == Size::Full;
    Ok(Some(arguments))
}

fn execute(arguments: &Arguments) -> Result<()> {
    if arguments.status {
        return write_status();
    }
    if !arguments.render.is_empty() || !arguments.chart.is_empty() {
        for file in &arguments.chart {
            draw(&Document::read(file)?, file)?;
        }
        for file in &arguments.render {
            println!("{}", render::markdown(&Document::read(file)?));
        }
        return Ok(());
    }
    let mut progress = |what: &str| eprintln!("{what}");
    let Outcome { document, failures } = match arguments.ranks {
        Some(world) => {
            let Options { peers, ref peers_folder, ref families, .. } = arguments.options;
            if let Some(unknown) = families.iter().find(|family| !ranks::NAMES.contains(&family.as_str())) {
                bail!("ranks have no family `{unknown}`: name some of {}", ranks::NAMES.join(", "));
            }
            let peers = if peers { Peers::start_ranks(peers_folder.as_deref(), world) } else { Err(anyhow!("not asked for")) };
            // After each comparison: a run that is cut short leaves what it had.
            let mut save = |document: &Document| arguments.json.as_ref().map_or(Ok(()), |path| document.write(path).map(drop));
            let document = ranks::run(world, &arguments.options, peers, &mut progress, &mut save)?;
            Outcome { document, failures: Vec::new() }
        }
        None => {
            let keep = |document: &Document| arguments.json.as_ref().map_or(Ok(()), |path| document.write(path).map(drop));
            run::run(&arguments.options, &mut progress, &mut { keep })?
        }
    };
    if let Some(path) = &arguments.json {
        for file in document.write(path)? {
            eprintln!("wrote {}", file.display());
            if arguments.options.sweep == Some(Sweep::Shapes) {
                draw(&document, &file)?;
            }
        }
    }
    if arguments.options.size == Size::Smoke {
        println!("A smoke run: the times are the emulator's and say nothing of a GPU.");
    }
    print!("{}", render::markdown(&document));
    ensure!(failures.is_empty(), "{} benchmark(s) failed:\n{}", failures.len(), failures.join("\n"));
    Ok(())
}

/// Writes the tables of docs/status.md, in the folder of the checkout in which it runs.
fn write_status() -> Result<()> {
    let page = Path::new("docs/status.md");
    let text =
        fs::read_to_string(page).with_context(|| format!("cannot read {} here: run it in the root of a checkout", page.display()))?;
    let made = status::put(&text, &status::markdown(Path::new("benches/results"))?)?;
    fs::write(page, made).with_context(|| format!("cannot write {}", page.display()))
}

/// Draws a document beside its file.
fn draw(document: &Document, file: &Path) -> Result<()> {
    let drawing = file.with_extension("svg");
    fs::write(&drawing, chart::svg(document)).with_context(|| format!("cannot write {}", drawing.display()))?;
    eprintln!("wrote {}", drawing.display());
    Ok(())
}
