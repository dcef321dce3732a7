//! `oxtile completions` and `oxtile man`: every command and every option is in them.

mod common;

use std::{fs, process::Command};

use common::{file, names, oxtile, run, stderr};
use oxtile_cli::arguments::command_line;

/// The commands, each with its options.
fn commands() -> Vec<(String, Vec<String>)> {
    let mut line = command_line();
    line.build();
    let options =
        |command: &clap::Command| command.get_arguments().filter_map(|argument| Some(format!("--{}", argument.get_long()?))).collect();
    let commands: Vec<_> = line.get_subcommands().map(|command| (command.get_name().to_owned(), options(command))).collect();
    assert!(commands.len() > 15 && commands.iter().any(|(name, _)| name == "launch"), "{commands:?}");
    commands
}

fn text(words: &[&str]) -> String {
    let words: Vec<&dyn AsRef<std::ffi::OsStr>> = words.iter().map(|word| word as _).collect();
    let done = run(&words);
    assert!(done.status.success() && done.stderr.is_empty(), "{}", stderr(&done));
    String::from_utf8(done.stdout).expect("UTF-8")
}

#[test]
fn every_shell_knows_every_command_and_option() {
    for (shell, begin) in [
        ("bash", "complete -F _oxtile "),
        ("zsh", "#compdef oxtile\n"),
        ("fish", "complete -c oxtile "),
        ("elvish", "set edit:completion:arg-completer[oxtile]"),
        ("powershell", "Register-ArgumentCompleter -Native -CommandName 'oxtile'"),
    ] {
        let script = text(&["completions", shell]);
        assert!(script.contains(begin), "{shell}: {script}");
        for (command, options) in commands() {
            assert!(script.contains(&command), "{shell}: {command}");
            for option in &options {
                // fish has them without the dashes.
                let option = if shell == "fish" { format!("-l {}", option.trim_start_matches('-')) } else { option.clone() };
                assert!(script.contains(&option), "{shell}: {command} {option}");
            }
        }
    }
}

/// Bash itself, which a run of the script asks.
#[test]
fn bash_completes() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(folder.path().join("script"), text(&["completions", "bash"])).expect("a writable folder");
    let complete = |words: &str| {
        let ask = format!(
            "source ./script; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _oxtile oxtile \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD-1]}}\"; echo \"${{COMPREPLY[*]}}\""
        );
        let done = Command::new("bash").args(["--norc", "-c", &ask]).current_dir(folder.path()).output().expect("bash");
        assert!(done.status.success(), "{}", stderr(&done));
        String::from_utf8(done.stdout).expect("UTF-8")
    };
    assert_eq!(complete("oxtile quan"), "quantize\n");
    assert_eq!(complete("oxtile quantize --form"), "--format\n");
    assert_eq!(complete("oxtile quantize --format nv"), "nvfp4 nvfp4-squares\n");
}

#[test]
fn every_command_has_its_page() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let pages = folder.path().join("man1");
    let said = text(&["man", "--out-dir", pages.to_str().expect("UTF-8")]);
    let commands: Vec<_> = commands().into_iter().filter(|(name, _)| name != "help").collect();
    assert!(said.starts_with(&format!("{} pages in ", commands.len() + 1)), "{said}");
    let mut expected: Vec<_> = commands.iter().map(|(name, _)| format!("oxtile-{name}.1")).chain(["oxtile.1".to_owned()]).collect();
    expected.sort();
    assert_eq!(names(&pages), expected);
    let page = |name: &str| std::fs::read_to_string(pages.join(name)).expect("a page");
    let whole = page("oxtile.1");
    assert_eq!(whole, text(&["man"]));
    for (name, options) in commands {
        // A dash is `\-` in roff.
        let (listed, page) = (format!("oxtile-{name}(1)").replace('-', "\\-"), page(&format!("oxtile-{name}.1")));
        assert!(whole.contains(&listed), "{name}");
        assert_eq!(page, text(&["man", &name]));
        assert!(page.contains(&format!(".TH oxtile-{name} 1")) && page.contains("\nExamples:\n"), "{page}");
        for option in options {
            assert!(page.contains(&format!("\\fB{}\\fR", option.replace('-', "\\-"))), "{name} {option}: {page}");
        }
    }
    let refused = run(&[&"man", &"--out-dir", &pages.join("oxtile.1")]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(stderr(&refused).contains("oxtile.1: cannot create the folder: "), "{}", stderr(&refused));
}

#[test]
fn help_is_a_help_however_it_is_asked_for() {
    for words in [&["help", "--help"][..], &["help", "-h"], &["help"]] {
        assert_eq!(text(words), text(&["--help"]), "{words:?}");
    }
    assert_eq!(text(&["help", "join", "--help"]), text(&["join", "--help"]));
}

/// The error says how such a file is named, and by that name it is read.
#[test]
fn a_file_whose_name_begins_with_a_dash() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    fs::write(folder.path().join("-file"), file(r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#, &[0; 4])).expect("a file");
    let inspect = |words: &[&str]| oxtile().arg("inspect").args(words).current_dir(folder.path()).output().expect("the binary runs");
    let refused = inspect(&["-file"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(stderr(&refused).contains("if '-file' is a file, write './-file'"), "{}", stderr(&refused));
    for words in [&["./-file"][..], &["--", "-file"]] {
        let done = inspect(words);
        assert!(done.status.success(), "{words:?}: {}", stderr(&done));
    }
}
