//! Builds the kernels of a crate outside this workspace, and sees each kind of wrong kernel refused.

use std::{
    cell::RefCell,
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use oxtile_build::{
    Arch, Builder, CudaTools, Error, Manifest, Toolchain, lint::Finding, machine_code::MachineCode, sass::Listing, source_hash,
};

/// One build at a time: they share a target directory, so that `core` is compiled once.
static BUILD: Mutex<()> = Mutex::new(());

/// Lays the crate out in the target directory with a manifest that makes it a workspace of its own.
fn external_crate() -> (MutexGuard<'static, ()>, PathBuf) {
    let guard = BUILD.lock().unwrap_or_else(PoisonError::into_inner);
    let (here, root) = (Path::new(env!("CARGO_MANIFEST_DIR")), Path::new(env!("CARGO_TARGET_TMPDIR")).join("external"));
    let tile = here.join("../tile").canonicalize().unwrap();
    let dsl = format!("oxtile-tile = {{ path = {tile:?} }}\n");
    let package = |name: &str| format!("[package]\nname = \"{name}\"\nedition = \"2024\"\n\n[dependencies]\n{dsl}");
    write(&root.join("helper/Cargo.toml"), &package("helper"));
    write(&root.join("kernels/Cargo.toml"), &(package("external-kernels") + "helper = { path = \"../helper\" }\n\n[workspace]\n"));
    for name in ["kernels", "helper"] {
        for file in fs::read_dir(here.join("tests/fixture").join(name)).unwrap() {
            let file = file.unwrap();
            write(&root.join(name).join("src").join(file.file_name()), &fs::read_to_string(file.path()).unwrap());
        }
    }
    (guard, root.join("kernels"))
}

/// Leaves a file alone that is right, so that cargo does not compile it again.
fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    if fs::read_to_string(path).ok().as_deref() != Some(text) {
        fs::write(path, text).unwrap();
    }
}

fn findings(builder: Builder<'_>) -> Vec<Finding> {
    match builder.build() {
        Err(Error::Lint { findings, .. }) => findings,
        other => panic!("the build should have been refused: {other:?}"),
    }
}

fn ratchet(family: &str, text: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join(format!("{family}.toml")), text).unwrap();
    folder
}

#[test]
fn a_crate_outside_the_workspace_builds() {
    let (_guard, folder) = external_crate();
    let out = tempfile::tempdir().unwrap();
    let steps = RefCell::new(Vec::new());
    let builder = Builder::new(&folder).family("meet").out_dir(out.path()).on_step(|step| steps.borrow_mut().push(step.to_owned()));
    let build = builder.build().unwrap();
    let [kernel] = &build.kernels[..] else { panic!("{build:?}") };
    assert_eq!(kernel.operations["bar"], 1);

    let manifest = Manifest::read(out.path()).unwrap();
    assert_eq!(manifest.source_hash, source_hash(&folder).unwrap());
    let files = &manifest.kernels["meet"].architectures[&"sm_90a".parse().unwrap()];
    let ptx = fs::read_to_string(out.path().join(&files.ptx)).unwrap();
    assert!(ptx.contains(".maxntid 128, 1, 1\n.minnctapersm 1\n"), "{ptx}");
    assert!(fs::read(out.path().join(&files.cubin)).unwrap().starts_with(b"\x7fELF"));

    steps.borrow_mut().clear();
    builder.build().unwrap();
    assert!(steps.borrow().is_empty(), "nothing changed, but it did: {:?}", steps.borrow());
}

#[test]
fn architectures_stand_side_by_side() {
    let (_guard, folder) = external_crate();
    let out = tempfile::tempdir().unwrap();
    let meet = |arch: &str| Builder::new(&folder).family("meet").arch(arch.parse().unwrap()).out_dir(out.path()).build().unwrap();
    let built = || Manifest::read(out.path()).unwrap().kernels["meet"].architectures.keys().map(Arch::to_string).collect::<Vec<_>>();
    meet("sm_90a");
    meet("sm_80");
    assert_eq!(built(), ["sm_80", "sm_90a"]);
    assert!(out.path().join("meet.sm_90a.cubin").exists());

    // No program takes kernels of other sources.
    let mut stale = Manifest::read(out.path()).unwrap();
    stale.source_hash = "of other sources".into();
    stale.write(out.path()).unwrap();
    meet("sm_80");
    assert_eq!(built(), ["sm_80"]);
    assert!(!out.path().join("meet.sm_90a.cubin").exists());
}

#[test]
fn a_checked_build_lies_where_a_program_can_be_told_to_look() {
    let (_guard, folder) = external_crate();
    let build = Builder::new(&folder).family("meet").checked(true).build().unwrap();
    // OXTILE_KERNELS names the folder above; the loader looks for the package's name in it.
    assert!(build.out_dir.ends_with("oxtile/kernels-checked/external-kernels"), "{}", build.out_dir.display());
    assert_eq!(Manifest::read(&build.out_dir).unwrap().package, "external-kernels");
}

#[test]
fn every_compiler_found_keeps_one_barrier_of_two_crates() {
    let (_guard, folder) = external_crate();
    for toolchain in Toolchain::all() {
        let build = Builder::new(&folder).family("meet").toolchain(toolchain.clone()).inspect().unwrap();
        assert_eq!(build.kernels[0].operations["bar"], 1, "{}", toolchain.version);
        assert_eq!(build.findings, []);
    }
}

#[test]
fn a_kernel_is_assembled_once_whatever_is_built_beside_it() {
    let (_guard, folder) = external_crate();
    let meet = |builder: Builder<'_>| {
        let build = builder.inspect().unwrap();
        let kernel = build.kernels.into_iter().find(|kernel| kernel.meta.name == "meet").unwrap();
        // The place in the cache is named after the text.
        (fs::read_to_string(&kernel.ptx).unwrap(), kernel.ptx)
    };
    let (alone, among_others) = (meet(Builder::new(&folder).family("meet")), meet(Builder::new(&folder)));
    assert!(alone.0.contains("$L__BB0_"), "without a label this shows nothing:\n{}", alone.0);
    assert_eq!(alone, among_others);
}

#[test]
fn other_architectures_have_their_own_code() {
    let (_guard, folder) = external_crate();
    let build = Builder::new(&folder).family("meet").arch("sm_80".parse().unwrap()).inspect().unwrap();
    assert!(fs::read_to_string(&build.kernels[0].ptx).unwrap().contains(".target sm_80\n"));
}

#[test]
fn an_architecture_that_is_named_twice_is_built_once() {
    let (_guard, folder) = external_crate();
    let build =
        ["sm_80", "sm_90a", "sm_80"].iter().fold(Builder::new(&folder).family("meet"), |builder, arch| builder.arch(arch.parse().unwrap()));
    let archs: Vec<_> = build.inspect().unwrap().kernels.iter().map(|kernel| kernel.arch.to_string()).collect();
    assert_eq!(archs, ["sm_80", "sm_90a"]);
}

#[test]
fn instructions_are_counted_as_nvdisasm_lists_them() {
    let (_guard, folder) = external_crate();
    let tools = CudaTools::find(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap();
    let build = Builder::new(&folder).arch("sm_80".parse().unwrap()).inspect().unwrap();
    let assembled = tempfile::tempdir().unwrap();
    for kernel in build.kernels.iter().filter(|kernel| ["meet", "spill"].contains(&&*kernel.meta.family)) {
        // Successors run the PTX of the oldest.
        for arch in ["sm_80", "sm_90a", "sm_100a", "sm_120a"] {
            let cubin = assembled.path().join("cubin");
            let mut ptxas = Command::new(&tools.ptxas);
            assert!(ptxas.arg(format!("-arch={arch}")).arg(&kernel.ptx).arg("-o").arg(&cubin).status().unwrap().success());
            let listing = Listing::of(&cubin, &tools).unwrap();
            let listed = (listing.instructions.len() as u32, listing.local_memory());
            let counted = MachineCode::of(&cubin).unwrap();
            assert_eq!((counted.instructions, counted.local_accesses), listed, "{} {arch}", kernel.meta.name);
            assert_eq!(kernel.meta.family == "spill", listed.1 > 0, "{} {arch}", kernel.meta.name);
            if arch == "sm_80" {
                assert_eq!((kernel.usage.instructions, kernel.usage.local_accesses), listed, "{}", kernel.meta.name);
            }
        }
    }
}

/// The sections of a cubin that the GPU reads: code and constants. Not `.nv.info`: it may name symbols, which line tables add.
fn device_sections(cubin: &Path) -> Vec<(String, Vec<u8>)> {
    use object::{Object, ObjectSection};
    let bytes = fs::read(cubin).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    let sections = file.sections().map(|section| (section.name().unwrap().to_owned(), section.data().unwrap().to_vec()));
    sections.filter(|(name, _)| [".text.", ".nv.constant"].iter().any(|kind| name.starts_with(kind))).collect()
}

#[test]
fn kernels_are_shipped_without_line_tables_and_with_the_same_code() {
    let (_guard, folder) = external_crate();
    let tools = CudaTools::find(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap();
    let build = |lines: bool| Builder::new(&folder).line_tables(lines).inspect().unwrap().kernels;
    let has = |cubin: &Path, what: &str| fs::read(cubin).unwrap().windows(what.len()).any(|bytes| bytes == what.as_bytes());
    let lined = tempfile::tempdir().unwrap();
    let shipped = build(false);
    assert!(shipped.len() > 3, "{shipped:?}");
    for kernel in &shipped {
        let cubin = lined.path().join("cubin");
        let mut ptxas = Command::new(&tools.ptxas);
        ptxas.arg(format!("-arch={}", kernel.arch)).arg("-lineinfo").arg(&kernel.ptx).arg("-o").arg(&cubin);
        assert!(ptxas.status().unwrap().success());
        let sections = device_sections(&kernel.cubin);
        assert!(sections.iter().any(|(name, code)| name.starts_with(".text.") && !code.is_empty()), "{}", kernel.meta.name);
        assert_eq!(sections, device_sections(&cubin), "{}", kernel.meta.name);
        assert!(has(&cubin, "debug_line") && !has(&kernel.cubin, "debug_line"), "{}", kernel.meta.name);
    }
    // A build for a profiler has them.
    assert!(build(true).iter().all(|kernel| has(&kernel.cubin, "debug_line")));
}

#[test]
fn a_duplicated_barrier_is_refused() {
    let (_guard, folder) = external_crate();
    let accepted = "[duplicated.sm_90a]\nregisters = 255\ninstructions = 1000\noperations.bar = 1\n";
    let ratchet = ratchet("duplicated", accepted);
    let found = findings(Builder::new(&folder).family("duplicated").ratchet(ratchet.path()));
    let text = found.iter().map(Finding::to_string).collect::<String>();
    assert!(text.contains("2 `bar` operations in the PTX") && text.contains("expects 1 (was a collective duplicated"), "{text}");
    let refused = Builder::new(&folder).family("duplicated").ratchet(ratchet.path()).build().unwrap_err().to_string();
    assert!(refused.contains("meet at the same one); at src/duplicated.rs:"), "{refused}");
}

#[test]
fn a_spill_is_refused_and_not_accepted_either() {
    let (_guard, folder) = external_crate();
    let accepted = tempfile::tempdir().unwrap();
    let found = findings(Builder::new(&folder).family("spill").ratchet(accepted.path()).accept(true));
    let text = found.iter().map(Finding::to_string).collect::<String>();
    assert!(text.contains("spill (sm_90a): ") && text.contains("bytes of registers are spilled"), "{text}");
    assert!(text.contains("; at src/spill.rs:"), "{text}");
    assert_eq!(fs::read_dir(accepted.path()).unwrap().count(), 0);
}

#[test]
fn what_is_not_shipped_is_not_accepted() {
    let (_guard, folder) = external_crate();
    let accepted = tempfile::tempdir().unwrap();
    let meet =
        || Builder::new(&folder).family("meet").ratchet(accepted.path()).accept(true).on_step(|step| panic!("it was compiled: {step}"));
    for (builder, what) in [(meet().checked(true), "bounds checks"), (meet().line_tables(true), "line tables")] {
        let expected = format!("figures with {what} are not those of what is shipped: accept without {what}");
        for result in [builder.build(), builder.inspect()] {
            assert!(result.unwrap_err().to_string().ends_with(&expected), "{what}");
        }
    }
    assert_eq!(fs::read_dir(accepted.path()).unwrap().count(), 0);
}

#[test]
fn a_check_that_can_panic_is_the_cause_that_is_named() {
    let (_guard, folder) = external_crate();
    let found = findings(Builder::new(&folder).family("panics"));
    let [stack] = &found[..] else { panic!("{found:?}") };
    let expected =
        "256 bytes of stack a thread: it calls `core::panicking::panic_const::panic_const_div_by_zero` (a `/` or `%` by a variable: ";
    assert!(stack.why.starts_with(expected), "{stack}");
    // The line of the division, not that of the array.
    assert!(stack.why.ends_with("; at src/panics.rs:8"), "{stack}");
    // A panic alone takes nothing, and is a note.
    let build = Builder::new(&folder).family("panics").inspect().unwrap();
    assert!(build.notes[0].starts_with("panics (sm_90a): calls `core::panicking::panic_const"), "{:?}", build.notes);
    assert!(build.notes[0].ends_with("; a build with --line-tables names the lines"), "{:?}", build.notes);
    let build = Builder::new(&folder).family("panics").line_tables(true).inspect().unwrap();
    assert!(build.notes[0].ends_with("or pass the quotient as an argument); at src/panics.rs:8"), "{:?}", build.notes);
}

#[test]
fn instances_are_refused_by_one_line_that_names_those_of_the_array() {
    let (_guard, folder) = external_crate();
    let error = Builder::new(&folder).family("conv").build().unwrap_err().to_string();
    let [title, stack] = &error.lines().collect::<Vec<_>>()[..] else { panic!("{error}") };
    assert!(title.contains("but 1 thing(s)"), "{title}");
    assert!(stack.starts_with("  conv (sm_90a, 2 instances: conv__k3, ...): 256 bytes of stack a thread; "), "{stack}");
    assert!(stack.ends_with("; at src/conv.rs:14, src/conv.rs:18"), "{stack}");
}

#[test]
fn a_function_defined_nowhere_is_refused() {
    let (_guard, folder) = external_crate();
    let found = findings(Builder::new(&folder).family("unresolved"));
    assert!(found[0].why.contains("calls `defined_nowhere`, which is defined nowhere"), "{found:?}");
    assert!(found[0].why.ends_with("; at src/unresolved.rs:11"), "{found:?}");
    // The command for one kernel has line tables already.
    let build = Builder::new(&folder).kernels(["unresolved"]).line_tables(true).inspect().unwrap();
    assert!(build.findings[0].why.ends_with("; at src/unresolved.rs:11"), "{:?}", build.findings);
}

#[test]
fn a_stale_ratchet_is_refused_and_accepting_mends_it() {
    let (_guard, folder) = external_crate();
    let meet = || Builder::new(&folder).family("meet");
    let out = tempfile::tempdir().unwrap();
    let stale = ratchet("meet", "[gone.sm_90a]\nregisters = 1\ninstructions = 1\n[gone.sm_80]\nregisters = 1\ninstructions = 1\n");
    let text = meet().ratchet(stale.path()).build().unwrap_err().to_string();
    assert!(text.contains("gone (sm_90a): ") && text.contains("family `meet` has it no longer"), "{text}");
    assert!(text.contains("meet (sm_90a): ") && text.contains("holds no figures of this kernel"), "{text}");
    assert!(
        text.contains(&format!("`oxtile build --manifest-path {} --accept`", folder.join("Cargo.toml").display()))
            && !text.contains("sm_80"),
        "{text}"
    );

    meet().ratchet(stale.path()).accept(true).out_dir(out.path()).build().unwrap();
    let build = meet().ratchet(stale.path()).out_dir(out.path()).build().unwrap();
    let [unhashed] = &build.notes[..] else { panic!("{:?}", build.notes) };
    assert!(unhashed.starts_with("external-kernels: programs do not know the hash of these sources"), "{unhashed}");

    let file = stale.path().join("meet.toml");
    let accepted = fs::read_to_string(&file).unwrap();
    let registers = format!("registers = {},", build.kernels[0].usage.registers);
    let [heading, "", "gone.sm_80 = { registers = 1, instructions = 1 }", meet_line] = &accepted.lines().collect::<Vec<_>>()[..] else {
        panic!("{accepted}")
    };
    assert!(heading.starts_with("# Accepted with rustc 1.95.0"), "{heading}");
    assert!(
        meet_line.starts_with(&format!("meet.sm_90a = {{ {registers} ")) && meet_line.ends_with(", operations = { bar = 1 } }"),
        "{accepted}"
    );
    fs::write(&file, accepted.replace(&registers, "registers = 2,")).unwrap();
    let found = findings(meet().ratchet(stale.path()));
    assert!(found[0].why.contains("accepts no more than 2"), "{found:?}");
    fs::write(&file, accepted.replace(&registers, "registers = 99,")).unwrap();
    assert!(meet().ratchet(stale.path()).inspect().unwrap().notes[0].contains("better: meet on sm_90a: 99 -> "));
}

#[test]
fn the_command_to_accept_names_the_architectures_that_were_refused() {
    let (_guard, folder) = external_crate();
    let figures = |arch: &str| format!("meet.{arch} = {{ registers = 1, instructions = 1 }}\n");
    let refused = |accepted: &str| {
        let (ratchet, archs) = (ratchet("meet", accepted), ["sm_80", "sm_90a"]);
        let builder = archs
            .iter()
            .fold(Builder::new(&folder).family("meet").ratchet(ratchet.path()), |builder, arch| builder.arch(arch.parse().unwrap()));
        builder.build().unwrap_err().to_string()
    };
    let command =
        |archs: &str| format!("`oxtile build --manifest-path {}{archs} --accept` writes them", folder.join("Cargo.toml").display());
    for (accepted, archs) in [("sm_80", " --arch sm_80"), ("sm_90a", "")] {
        let text = refused(&figures(accepted));
        assert!(text.contains(&command(archs)), "{text}");
    }
    let text = refused(&[figures("sm_80"), figures("sm_90a")].concat());
    assert!(text.contains(&command(" --arch sm_80,sm_90a")), "{text}");
    // Of a family without figures, all.
    let none = ratchet("meet", "");
    fs::remove_file(none.path().join("meet.toml")).unwrap();
    let text = Builder::new(&folder).family("meet").arch("sm_80".parse().unwrap()).ratchet(none.path()).build().unwrap_err().to_string();
    assert!(text.contains(&command(" --arch sm_80")), "{text}");
}

/// Edits a source and gives it a time long past, as tools do that copy files with their times.
fn edit_in_the_past(path: &Path, from: &str, to: &str) {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{text}");
    fs::write(path, text.replace(from, to)).unwrap();
    let past = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000);
    fs::File::options().write(true).open(path).unwrap().set_modified(past).unwrap();
}

#[test]
fn sources_with_old_times_are_compiled() {
    let (_guard, folder) = external_crate();
    let barriers = || Builder::new(&folder).family("meet").inspect().unwrap().kernels[0].operations["bar"];
    assert_eq!(barriers(), 1);
    // In the dependency and in the crate itself; the next test lays both out anew.
    let once = "oxtile_tile::block::sync();";
    edit_in_the_past(&folder.join("../helper/src/lib.rs"), once, &once.repeat(2));
    assert_eq!(barriers(), 2);
    let once = "helper::meet();";
    edit_in_the_past(&folder.join("src/meet.rs"), once, &once.repeat(2));
    assert_eq!(barriers(), 4);
}

#[test]
fn an_unknown_family_is_named_with_those_there_are() {
    let (_guard, folder) = external_crate();
    let error = Builder::new(&folder).family("met").build().unwrap_err().to_string();
    assert!(error.contains("no family `met`; this crate has: conv, duplicated, meet, panics, spill, unresolved"), "{error}");
}

#[test]
fn a_kernel_that_does_not_compile_is_shown_as_rustc_shows_it() {
    let (_guard, folder) = external_crate();
    let meet = folder.join("src/meet.rs");
    let right = fs::read_to_string(&meet).unwrap();
    fs::write(&meet, right.replace("helper::meet()", "helper::met()")).unwrap();
    let error = Builder::new(&folder).family("meet").build();
    fs::write(&meet, right).unwrap();
    let error = error.unwrap_err().to_string();
    assert!(error.starts_with("compiling family `meet` for sm_90a failed\nerror[E0425]: cannot find function `met`"), "{error}");
    assert!(!error.contains("mend"), "{error}");
}

#[test]
fn what_needs_std_is_told_what_to_take_instead() {
    let (_guard, folder) = external_crate();
    let meet = folder.join("src/meet.rs");
    let right = fs::read_to_string(&meet).unwrap();
    for wrong in
        ["2.0_f32.sqrt()", "f32::exp(2.0)", "println!()", "vec![1]", "Vec::<u8>::new()", "std::process::abort()", "{ use std::fs; }"]
    {
        fs::write(&meet, right.replace("helper::meet()", wrong)).unwrap();
        let error = Builder::new(&folder).family("meet").build();
        fs::write(&meet, &right).unwrap();
        let error = error.unwrap_err().to_string();
        assert!(error.contains("\n  mend: the GPU has no std: take `num::sqrt`"), "{wrong}: {error}");
    }
}
