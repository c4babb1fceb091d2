use super::*;

#[test]
fn each_answer_of_the_kernel_has_its_name() {
    for (errno, expected) in [
        (Errno::AGAIN, "Full"),
        (Errno::NXIO, "InterfaceGone"),
        (Errno::NODEV, "InterfaceGone"),
        (Errno::NETDOWN, "InterfaceGone"),
        (Errno::MSGSIZE, "TooLong"),
        (Errno::NOBUFS, "Dropped"),
        (Errno::INVAL, "Io"),
    ] {
        let error = format!("{:?}", ReleaseError::from(errno));
        assert!(error.starts_with(expected), "{errno}: {error}");
    }
}

#[test]
fn the_address_is_of_the_interface_and_the_frames_type() {
    let mut frame = [0; 60];
    frame[12..14].copy_from_slice(&[0x86, 0xdd]);
    let LinkAddress(address) = LinkAddress::new(7, &frame);
    assert_eq!(address.sll_ifindex, 7);
    assert_eq!(address.sll_protocol, 0x86dd_u16.to_be());
    assert_eq!(LinkAddress::new(7, &frame[..13]).0.sll_protocol, 0);
}

#[test]
fn each_reason_has_a_counter_of_its_own() {
    let lost = LostAnswers::default();
    let errors = [
        ReleaseError::Full,
        ReleaseError::InterfaceGone,
        ReleaseError::TooLong,
        ReleaseError::Dropped,
        ReleaseError::Tagged,
        ReleaseError::NotSegmentable,
        ReleaseError::Io(io::ErrorKind::Other.into()),
    ];
    for error in &errors {
        lost.count(error);
    }
    let counted = errors.iter().map(|error| (error.reason(), 1));
    assert_eq!(lost.read(), counted.collect::<Vec<_>>());
}
