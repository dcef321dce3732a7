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
    match request.and_then(|request| oxtile_cli::command::run(request, &mut std::io::stdout())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            oxtile_cli::message::tell(&error.to_string());
            error.exit_code()
        }
    }
}
