//! `cargo xtask image`: the agent's image, by whatever builds images here.

use std::process::{Command, Stdio};

use anyhow::{Result, ensure};
use clap::Args;
use dnsflow_tests::support::workspace;

use crate::{interrupt, unavailable::Unavailable};

/// What builds images, in the order of preference.
const BUILDERS: &[&str] = &["docker", "podman", "buildah"];

/// Builds the agent's image.
#[derive(Debug, Args)]
pub(crate) struct ImageCommand {
    /// The image's name and tag
    #[arg(long, default_value = "dnsflow:latest")]
    tag: String,
}

/// Builds the image.
pub(crate) fn run(command: &ImageCommand) -> Result<()> {
    build(&command.tag)
}

/// Builds the image with this tag.
pub(crate) fn build(tag: &str) -> Result<()> {
    let builder = builder(BUILDERS)?;
    eprintln!("building {tag} with {builder}; the first time takes many minutes");
    let mut command = Command::new(builder);
    command
        .args(arguments(builder, tag))
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
fn arguments(builder: &str, tag: &str) -> Vec<String> {
    let verb = match builder {
        "buildah" => "bud",
        _ => "build",
    };
    [verb, "--file", "deploy/Containerfile", "--tag", tag, "."]
        .map(str::to_owned)
        .to_vec()
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
        for builder in BUILDERS {
            let arguments = arguments(builder, "a:b");
            let file = arguments.iter().position(|word| word == "--file");
            let file = file.map(|at| workspace().expect("a workspace").join(&arguments[at + 1]));
            assert!(file.is_some_and(|file| file.is_file()), "{arguments:?}");
        }
    }
}
