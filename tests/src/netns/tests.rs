use std::{fs, thread};

use rustix::mount::{MountFlags, mount, mount_bind_recursive};

use super::*;
use crate::support::{not_run, this_test};

/// Runs on a thread whose mounts nobody else sees, with an empty directory of namespaces.
fn with_mounts_of_its_own(work: fn() -> Result<()>) {
    if !rustix::process::geteuid().is_root() {
        return not_run(&this_test(), "it takes root to mount");
    }
    let apart = thread::spawn(move || {
        // SAFETY: a new mount namespace leaves memory and file descriptors as they are.
        unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
        private_mounts()?;
        fs::create_dir_all(DIR)?;
        mount("none", DIR, "tmpfs", MountFlags::empty(), None)?;
        // As in a container. Where it is shared, what is unmounted above is unmounted below, too.
        mount_change(DIR, MountPropagationFlags::PRIVATE)?;
        work()
    });
    apart.join().expect("no panic").expect("it works");
}

/// What the first `ip netns add` of a machine does.
fn bind_directory_onto_itself() -> Result<()> {
    mount_bind_recursive(DIR, DIR)?;
    let shared = MountPropagationFlags::SHARED | MountPropagationFlags::REC;
    Ok(mount_change(DIR, shared)?)
}

fn names() -> Result<Vec<String>> {
    fs::read_dir(DIR)?
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect()
}

#[test]
fn a_namespace_below_another_mount_of_the_directory_is_removed() {
    with_mounts_of_its_own(|| {
        let before = NetNs::create("before")?;
        let stays = NetNs::create("stays")?;
        bind_directory_onto_itself()?;
        let between = NetNs::create("between")?;
        bind_directory_onto_itself()?;
        let after = NetNs::create("after")?;
        for namespace in [&before, &between, &after] {
            namespace.delete()?;
            assert!(!namespace.exists(), "{namespace}");
        }
        assert_eq!(names()?, ["stays"]);
        // What belongs to others is still mounted.
        stays.run(|| Ok(()))?;
        // The names can be had again.
        NetNs::create("before")?.delete()
    });
}

#[test]
fn what_an_earlier_run_could_not_remove_is_removed() {
    with_mounts_of_its_own(|| {
        let left = NetNs::create("left")?;
        bind_directory_onto_itself()?;
        // As far as it came: the upper mount is gone, and the name stayed.
        unmount(left.path(), UnmountFlags::DETACH)?;
        assert!(fs::remove_file(left.path()).is_err(), "it is mounted");
        left.delete()?;
        assert_eq!(names()?, [""; 0]);
        left.delete()
    });
}

#[test]
fn the_root_of_a_plain_chroot_is_no_mount() {
    // `cat /proc/self/mountinfo` in a chroot into a directory, with /proc mounted.
    let chroot = "1095 1094 0:22 / /proc rw,relatime - proc proc rw\n";
    let whole = "29 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n";
    assert!(!is_mounted(chroot, "/"));
    assert!(is_mounted(&format!("{whole}{chroot}"), "/"));
}
