//! `cargo xtask image`: the agent's image, by whatever builds images here, or as a file that needs
//! no builder.

mod archive;
mod compiler;
mod program;
mod sbom;
mod source;

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, ensure};
use clap::Args;
use dnsflow_tests::support::workspace;

use self::{
    archive::{Name, Program},
    compiler::Compiler,
};
pub(crate) use self::{program::Target, source::Source};
use crate::{interrupt, unavailable::Unavailable};

/// What builds images, in the order of preference.
const BUILDERS: &[&str] = &["docker", "podman", "buildah"];

/// Builds the agent's image.
#[derive(Debug, Args)]
pub(crate) struct ImageCommand {
    /// The image's name and tag
    #[arg(long, default_value = "dnsflow:latest")]
    tag: String,
    /// Write an OCI archive, with no builder of images; *.debug and *.cdx.json come beside it
    #[arg(long, value_name = "FILE")]
    oci: Option<PathBuf>,
    /// Write only the program that an image holds, as deploy/Containerfile wants it
    #[arg(long, value_name = "FILE", conflicts_with = "oci")]
    program: Option<PathBuf>,
    /// Compile for this target of rustc's; more than one with commas, all in one archive
    /// [default: this machine's]
    #[arg(long, value_name = "TARGET", value_delimiter = ',')]
    target: Vec<String>,
}

/// Builds the image.
pub(crate) fn run(command: &ImageCommand) -> Result<()> {
    let ImageCommand {
        tag,
        oci,
        program,
        target,
    } = command;
    let mut targets = Vec::new();
    for name in target {
        targets.push(Target::named(Some(name))?);
    }
    if targets.is_empty() {
        targets.push(Target::named(None)?);
    }
    match (oci, program) {
        (Some(file), _) => {
            let archive = write_archive(file, tag, &targets)?;
            println!("{} {}", file.display(), archive.digest);
            for part in &archive.parts {
                println!("{}\n{}", part.debug.display(), part.sbom.display());
            }
            Ok(())
        }
        (None, Some(file)) => {
            ensure!(
                targets.len() == 1,
                "--program: one target, not {}",
                targets.len()
            );
            let source = Source::of(&workspace()?)?;
            let compiler = Compiler::of(&workspace()?, &targets[0])?;
            let built = program::build(&workspace()?, &targets[0], &compiler, &source)?;
            program::copy(&built.program, file)
        }
        (None, None) => {
            ensure!(target.is_empty(), "--target goes with --oci or --program");
            build(tag)
        }
    }
}

/// Writes an archive with the image for this machine.
pub(crate) fn write_for_here(file: &Path, tag: &str) -> Result<()> {
    write_archive(file, tag, &[Target::named(None)?])?;
    Ok(())
}

/// An archive, and the files of each target beside it.
#[derive(Clone, Debug)]
pub(crate) struct Archive {
    /// The image's digest; of several targets, that of their index.
    pub(crate) digest: String,
    /// In the order of the targets.
    pub(crate) parts: Vec<Part>,
}

/// The files of a target.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// The architecture, as OCI calls it.
    pub(crate) architecture: &'static str,
    /// The program in the image.
    pub(crate) program: Vec<u8>,
    /// Its line tables and symbols.
    pub(crate) debug: PathBuf,
    /// The content of the program.
    pub(crate) sbom: PathBuf,
}

/// An error that names the missing part, if no image can be built for this target.
pub(crate) fn ensure_possible(target: &Target) -> Result<()> {
    target.ensure_tools()?;
    Compiler::of(&workspace()?, target)?;
    Ok(())
}

/// Writes an archive with an image for each target, and beside it for each target the line tables
/// and the list of what is in the program.
pub(crate) fn write_archive(file: &Path, tag: &str, targets: &[Target]) -> Result<Archive> {
    let name = Name::parse(tag)?;
    let source = Source::of(&workspace()?)?;
    let mut built = Vec::new();
    for target in targets {
        target.ensure_tools()?;
        let compiler = Compiler::of(&workspace()?, target)?;
        let program = program::build(&workspace()?, target, &compiler, &source)?;
        built.push((target, compiler, program));
    }
    // What is said of the program must be true of the files that it was compiled from. Nothing is written
    // before: the archive may lie in the checkout.
    ensure!(
        Source::of(&workspace()?)? == source,
        "the checkout has changed while it was built: build again"
    );
    let mut programs = Vec::new();
    let mut parts = Vec::new();
    for (target, compiler, built) in built {
        let bytes = fs::read(&built.program)
            .with_context(|| format!("cannot read {}", built.program.display()))?;
        programs.push(Program {
            architecture: target.architecture,
            bytes: bytes.clone(),
        });
        let debug = file.with_extension(format!("{}.debug", target.architecture));
        program::copy(&built.debug, &debug)?;
        let list = file.with_extension(format!("{}.cdx.json", target.architecture));
        let document = sbom::document(&workspace()?, target, &compiler, &source)?;
        fs::write(&list, document).with_context(|| format!("cannot write {}", list.display()))?;
        parts.push(Part {
            architecture: target.architecture,
            program: bytes,
            debug,
            sbom: list,
        });
    }
    let digest = archive::write(file, &name, &source, &programs)?;
    Ok(Archive { digest, parts })
}

/// Builds the image with this tag.
pub(crate) fn build(tag: &str) -> Result<()> {
    let builder = builder(BUILDERS)?;
    eprintln!("building {tag} with {builder}; the first time takes many minutes");
    let mut command = Command::new(builder);
    command
        .args(arguments(builder, tag, &Source::of(&workspace()?)?))
        .current_dir(workspace()?);
    let status = interrupt::wait(interrupt::spawn(&mut command)?)?;
    ensure!(status.success(), "{builder} failed ({status})");
    println!("{tag}");
    Ok(())
}

/// The first of these that works: a client without its daemon does not.
fn builder<'a>(builders: &[&'a str]) -> Result<&'a str, Unavailable> {
    let works = |builder: &&&str| {
        Command::new(builder)
            .arg("info")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    };
    builders.iter().find(works).copied().ok_or_else(|| {
        let names = builders.join(", ");
        Unavailable(format!(
            "building an image takes one of {names}, with its daemon if it has one; `BUILDER info` \
             succeeds with none of them"
        ))
    })
}

/// All of them take the same.
fn arguments(builder: &str, tag: &str, source: &Source) -> Vec<String> {
    let verb = match builder {
        "buildah" => "bud",
        _ => "build",
    };
    let mut arguments = [verb, "--file", "deploy/Containerfile", "--tag", tag]
        .map(str::to_owned)
        .to_vec();
    for (key, value) in archive::labels(source) {
        arguments.extend(["--label".to_owned(), format!("{key}={value}")]);
    }
    for (name, value) in source.variables() {
        arguments.extend(["--build-arg".to_owned(), format!("{name}={value}")]);
    }
    arguments.push(".".to_owned());
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_builder_that_does_not_work_is_passed_over() {
        assert_eq!(
            builder(&["/nowhere/docker", "false", "true"]).ok(),
            Some("true")
        );
        let error = builder(&["false"]).expect_err("it does not work");
        assert!(error.to_string().contains("nothing was done"), "{error}");
    }

    #[test]
    fn the_containerfile_is_where_the_builder_is_told() {
        let source = Source::of(&workspace().expect("a workspace")).expect("the sources");
        for builder in BUILDERS {
            let arguments = arguments(builder, "a:b", &source);
            let file = arguments.iter().position(|word| word == "--file");
            let file = file.map(|at| workspace().expect("a workspace").join(&arguments[at + 1]));
            assert!(file.is_some_and(|file| file.is_file()), "{arguments:?}");
        }
    }

    #[test]
    fn the_containerfile_takes_what_the_builder_is_given() {
        let file = workspace()
            .expect("a workspace")
            .join("deploy/Containerfile");
        let text = fs::read_to_string(file).expect("a file");
        let source = Source::of(&workspace().expect("a workspace")).expect("the sources");
        for (name, _) in source.variables() {
            assert!(text.contains(&format!("\nARG {name}=")), "{name}");
        }
    }
}
