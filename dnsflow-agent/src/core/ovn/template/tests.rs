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

fn parse(prefix: &str, actions: &str) -> Result<Template, TemplateError> {
    Template::parse(&flow(prefix, actions))
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
        assert_eq!(template.actions(45), expected, "{actions}");
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
fn logs_are_left_out_and_counted() {
    let log = r#"log(name="EF:ns1;0", severity=notice, verdict=allow, meter="a;b")"#;
    for actions in [
        format!("{log}; reg8[16] = 1; next;"),
        format!("reg8[16] = 1; {log}; next;"),
    ] {
        let template = parse("", &actions).expect("understood");
        assert_eq!(template.steps.len(), 2, "{actions}");
        assert_eq!(template.logs_left_out, 1);
    }
}

#[test]
fn tests_of_one_register_are_joined_or_refused() {
    let template = parse("reg0[7] == 1 && reg0[9] == 0 && ", "next;").expect("understood");
    assert_eq!(template.registers[&0], Masked::new(0x80, 0x280));
    assert_eq!(
        parse("reg0[7] == 1 && reg0[7] == 0 && ", "next;"),
        Err(TemplateError::Test("reg0[7] == 0".into()))
    );
}

#[test]
fn what_is_not_understood_is_refused_by_name() {
    let test = |prefix: &str, named: &str| {
        assert_eq!(
            parse(prefix, "next;"),
            Err(TemplateError::Test(named.into()))
        );
    };
    test("ct.est && ", "ct.est");
    test("reg0[32] == 1 && ", "reg0[32] == 1");
    test("reg16 == 1 && ", "reg16 == 1");
    test("reg0[1] == 2 && ", "reg0[1] == 2");
    test("reg0[1] != 1 && ", "reg0[1] != 1");
    let action = |actions: &str, named: &str| {
        assert_eq!(parse("", actions), Err(TemplateError::Action(named.into())));
    };
    action(
        "next(pipeline=ingress, table=3);",
        "next(pipeline=ingress, table=3)",
    );
    action(
        "reg8[16] = 1; sample(probability=65535); next;",
        "sample(probability=65535)",
    );
    action(
        "ct_commit { ct_mark.blocked = 1; }; next;",
        "ct_commit { ct_mark.blocked = 1; }",
    );
    let mut bare = flow("", "next;");
    bare.matches = "reg0[8] == 1".into();
    assert_eq!(
        Template::parse(&bare),
        Err(TemplateError::NoAclMatch("reg0[8] == 1".into()))
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
    assert_eq!(
        parse("reg0[9] == 1 && ", "/* drop */")
            .expect("understood")
            .steps,
        []
    );
}
