use super::*;

const ACL: &str = "(ip4.dst == $a1) && inport == @a2";

fn flow(prefix: &str, actions: &str) -> LogicalFlow {
    LogicalFlow {
        pipeline: Pipeline::Egress,
        table_id: 6,
        priority: 11000,
        matches: format!("{prefix}({ACL})"),
        actions: actions.to_owned(),
        stage_hint: Some(1),
    }
}

fn parse(prefix: &str, actions: &str) -> Result<AclTemplate, AclTemplateError> {
    AclTemplate::parse(&flow(prefix, actions))
}

fn bit(register: u8, at: u32) -> Action {
    Action::SetRegister {
        register,
        bits: Masked::new(1 << at, 1 << at),
    }
}

#[test]
fn each_ovn_release_is_understood() {
    let check = |prefix: &str, actions: &str, registers: &[(u8, u32, u32)], expected: &[Action]| {
        let template = parse(prefix, actions).expect("understood");
        let registers = registers
            .iter()
            .map(|&(register, value, mask)| (register, Masked::new(value, mask)))
            .collect();
        assert_eq!(template.registers, registers, "{prefix}");
        assert_eq!(
            template.actions(45, &CachedActions::new()).as_deref(),
            Some(expected),
            "{actions}"
        );
        assert_eq!(template.table(45), 51);
    };
    let next = Action::Resubmit { table: 52 };
    // 23.03
    check(
        "reg0[7] == 1 && ",
        "reg0[1] = 1; next;",
        &[(0, 0x80, 0x80)],
        &[bit(0, 1), next.clone()],
    );
    check(
        "reg0[8] == 1 && ",
        "next;",
        &[(0, 0x100, 0x100)],
        std::slice::from_ref(&next),
    );
    // 25.03 and 26.03: tiers, and the verdict in reg8
    check(
        "reg8[30..31] == 2 && reg0[8] == 1 && ",
        "reg8[16] = 1; next;",
        &[(0, 0x100, 0x100), (8, 0x8000_0000, 0xc000_0000)],
        &[bit(8, 16), next.clone()],
    );
    // stateless: no hint at all
    check("", "next;", &[], std::slice::from_ref(&next));
    // observability
    check(
        "reg0[8] == 1 && ",
        "reg8[16] = 1; reg0[13] = 1; reg3 = 2984016908; reg8[0..7] = 1; reg8[19..20] = 2; next;",
        &[(0, 0x100, 0x100)],
        &[
            bit(8, 16),
            bit(0, 13),
            Action::SetRegister {
                register: 3,
                bits: Masked::new(2_984_016_908, u32::MAX),
            },
            Action::SetRegister {
                register: 8,
                bits: Masked::new(1, 0xff),
            },
            Action::SetRegister {
                register: 8,
                bits: Masked::new(2 << 19, 3 << 19),
            },
            next,
        ],
    );
}

#[test]
fn the_match_of_the_acl_is_found() {
    let check = |matches: &str, found: Option<&str>| {
        let mut flow = flow("", "next;");
        flow.matches = matches.to_owned();
        assert_eq!(acl_match(&flow), found, "{matches}");
        assert_eq!(
            AclTemplate::parse(&flow).is_ok(),
            found.is_some(),
            "{matches}"
        );
    };
    let ports = format!("{ACL} && ((udp && ( udp.dst == 53 )) || (tcp))");
    for acl in [ACL, &ports] {
        check(&format!("reg0[8] == 1 && ({acl})"), Some(acl));
        check(&format!("({acl})"), Some(acl));
        // OVN 23.03 without conntrack: as it stands in the NB database.
        check(acl, Some(acl));
        check(&format!("reg0[8] == 1 && {acl}"), None);
        check(&format!("reg0[8] == 1 && ({acl}"), None);
    }
    check("reg0[8] == 1", None);
}

const LOG: &str = r#"log(name="EF:ns1;0", severity=notice, verdict=allow, meter="a;b")"#;

#[test]
fn logs_are_copied_where_they_can_be_and_else_left_out() {
    for actions in [
        format!("{LOG}; reg8[16] = 1; next;"),
        format!("reg8[16] = 1; {LOG}; next;"),
    ] {
        let template = parse("", &actions).expect("understood");
        let without = template.actions(45, &CachedActions::new());
        assert_eq!(
            without,
            Some(vec![bit(8, 16), Action::Resubmit { table: 52 }])
        );
        let source = ActionText::of(&flow("", &actions));
        let cached_actions = CachedActions::from([(source, vec![1; 8])]);
        assert_eq!(
            template.actions(45, &cached_actions),
            Some(vec![Action::Copied(vec![1; 8])])
        );
        assert_eq!(first_to_copy(&actions), Some(LOG));
    }
}

#[test]
fn a_drop_drops_without_its_commit_where_that_cannot_be_copied_yet() {
    let to_drop = Action::Resubmit { table: 52 };
    for (actions, meanwhile) in [
        // OVN 23.03, and 25.03 with 26.03.
        ("ct_commit { ct_mark.blocked = 1; }; /* drop */", vec![]),
        (
            "reg8[17] = 1; ct_commit { ct_mark.blocked = 1; ct_label.obs_point_id = 0; }; next;",
            vec![bit(8, 17), to_drop],
        ),
    ] {
        let template = parse("reg0[10] == 1 && ", actions).expect("understood");
        assert_eq!(template.actions(45, &CachedActions::new()), Some(meanwhile));
        assert!(any_marks_as_blocked(actions));
        let source = ActionText::of(&flow("", actions));
        let cached_actions = CachedActions::from([(source, vec![1; 8])]);
        let copied = Some(vec![Action::Copied(vec![1; 8])]);
        assert_eq!(template.actions(45, &cached_actions), copied);
    }
}

#[test]
fn what_is_not_understood_is_copied_or_nothing() {
    let actions = "reg8[17] = 1; ct_commit { ct_label.label = 7; }; next;";
    let template = parse("reg0[10] == 1 && ", actions).expect("understood");
    assert_eq!(template.actions(45, &CachedActions::new()), None);
    assert_eq!(
        first_to_copy(actions),
        Some("ct_commit { ct_label.label = 7; }")
    );
    let source = ActionText::of(&flow("", actions));
    let cached_actions = CachedActions::from([(source.clone(), vec![1; 8])]);
    assert_eq!(
        template.actions(45, &cached_actions),
        Some(vec![Action::Copied(vec![1; 8])])
    );
    // Elsewhere, `next` leads elsewhere.
    let elsewhere = ActionText {
        table_id: 7,
        ..source
    };
    let cached_actions = CachedActions::from([(elsewhere, vec![1; 8])]);
    assert_eq!(template.actions(45, &cached_actions), None);
    for actions in [
        "next(pipeline=ingress, table=3);",
        "reg8[16] = 1; sample(); next;",
    ] {
        let template = parse("", actions).expect("understood");
        assert_eq!(
            template.actions(45, &CachedActions::new()),
            None,
            "{actions}"
        );
    }
}

#[test]
fn tests_of_one_register_are_joined_or_refused() {
    let template = parse("reg0[7] == 1 && reg0[9] == 0 && ", "next;").expect("understood");
    assert_eq!(template.registers[&0], Masked::new(0x80, 0x280));
    assert_eq!(
        parse("reg0[7] == 1 && reg0[7] == 0 && ", "next;"),
        Err(AclTemplateError::Test("reg0[7] == 0".into()))
    );
}

#[test]
fn tests_that_are_not_understood_are_refused_by_name() {
    let test = |prefix: &str, named: &str| {
        assert_eq!(
            parse(prefix, "next;"),
            Err(AclTemplateError::Test(named.into()))
        );
    };
    test("ct.est && ", "ct.est");
    test("reg0[32] == 1 && ", "reg0[32] == 1");
    test("reg16 == 1 && ", "reg16 == 1");
    test("reg0[1] == 2 && ", "reg0[1] == 2");
    test("reg0[1] != 1 && ", "reg0[1] != 1");
    let mut bare = flow("", "next;");
    bare.matches = "reg0[8] == 1".into();
    assert_eq!(
        AclTemplate::parse(&bare),
        Err(AclTemplateError::NoAclMatch("reg0[8] == 1".into()))
    );
}

#[test]
fn the_acls_match_is_found_behind_the_tests() {
    assert_eq!(acl_match(&flow("", "next;")), Some(ACL));
    assert_eq!(
        acl_match(&flow("reg8[30..31] == 2 && reg0[8] == 1 && ", "next;")),
        Some(ACL)
    );
}

#[test]
fn a_drop_has_no_steps() {
    let template = parse("reg0[9] == 1 && ", "/* drop */").expect("understood");
    assert_eq!(template.actions, ActionTemplate::Build(vec![]));
}
