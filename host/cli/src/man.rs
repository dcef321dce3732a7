//! `oxtile man`: manual pages, which hold what `--help` shows.

use std::{
    fs,
    io::{self, Write},
    iter,
    path::Path,
};

use clap::Command;
use clap_mangen::roff::{Roff, roman};

use crate::{
    arguments::{self, command_line},
    output::{Completed, Output},
    safetensors::WriteError,
    text::path,
};

/// A page for man(1).
#[derive(Debug)]
pub struct Page {
    /// The command's name; that of `oxtile` itself is empty.
    pub command: String,
    /// The name of its file.
    pub file: String,
    /// The page.
    pub text: String,
}

/// What is printed, and the pages that are written, but for their names.
///
/// # Errors
/// If the folder or a page cannot be written.
pub fn run(request: &arguments::Man) -> Result<(String, Vec<Completed>), WriteError> {
    let pages = pages();
    let Some(folder) = &request.out_dir else {
        let wanted = request.command.as_deref().unwrap_or_default();
        let text = pages.into_iter().find(|page| page.command == wanted).expect("a page for each command").text;
        return Ok((text, Vec::new()));
    };
    fs::create_dir_all(folder).map_err(|error| WriteError::Io { file: folder.clone(), action: "create the folder", error })?;
    let completed = pages.iter().map(|page| write(folder, page)).collect::<Result<Vec<_>, _>>()?;
    Ok((format!("{} pages in {}\n", completed.len(), path(folder)), completed))
}

/// The pages of `oxtile` and of all commands.
pub fn pages() -> Vec<Page> {
    let mut line = command_line().disable_help_subcommand(true);
    line.build();
    let commands = line.get_subcommands().map(|command| (command.get_name(), command));
    let page = |(name, command): (&str, &Command)| Page {
        command: name.to_owned(),
        file: format!("{}.1", command.get_display_name().unwrap_or("oxtile")),
        text: text(command).expect("memory takes all"),
    };
    iter::once(("", &line)).chain(commands).map(page).collect()
}

fn text(command: &Command) -> io::Result<String> {
    let man = clap_mangen::Man::new(command.clone()).source(concat!("oxtile ", env!("CARGO_PKG_VERSION"))).manual("Oxtile");
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    if let Some(notes) = command.get_after_help() {
        let mut roff = Roff::new();
        roff.control("SH", ["NOTES"]);
        // Lines stay as they are: there are tables and examples among them.
        roff.control("nf", []);
        for line in notes.to_string().lines() {
            roff.text([roman(line)]);
        }
        roff.control("fi", []);
        roff.to_writer(&mut page)?;
    }
    Ok(String::from_utf8(page).expect("a page is text"))
}

fn write(folder: &Path, page: &Page) -> Result<Completed, WriteError> {
    let output = Output::create(&folder.join(&page.file), &[])?;
    output.file().write_all(page.text.as_bytes()).map_err(|error| output.error("write", error))?;
    output.complete()
}
