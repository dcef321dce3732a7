//! The binary `oxtile`.

use std::process::ExitCode;

fn main() -> ExitCode {
    if oxtile_cli::launch::guardian::is_done(std::env::args_os().skip(1)) {
        return ExitCode::SUCCESS;
    }
    if let Err(error) = oxtile_cli::interrupt::install() {
        oxtile_cli::message::tell(&format!("cannot handle signals: {error}"));
        return ExitCode::FAILURE;
    }
    let request = oxtile_cli::arguments::parse(std::env::args_os().skip(1)).map_err(oxtile_cli::Error::from);
    let done = request.and_then(|request| oxtile_cli::command::run(request, &mut std::io::stdout()));
    // The runtimes are gone, and their recordings written.
    let untold = oxtile::timeline::take_trace_failure();
    untold.iter().for_each(|failure| oxtile_cli::message::tell(failure));
    match done {
        Ok(()) if untold.is_some() => ExitCode::FAILURE,
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let (output, line) = error.parts();
            output.inspect(|output| oxtile_cli::message::tell_output(output));
            oxtile_cli::message::tell(&line);
            error.exit_code()
        }
    }
}
