#![allow(clippy::unwrap_used)]

use super::*;

#[test]
fn every_stage_has_a_tag_of_its_own() {
    let mut tags = BTreeSet::new();
    for pipeline in [Pipeline::Ingress, Pipeline::Egress] {
        for table_id in 0..=u8::MAX {
            assert!(tags.insert(tag(Stage::Table(pipeline, table_id))));
        }
    }
    assert!(tags.insert(tag(Stage::OutPortSecurity)));
}

#[test]
fn samples_are_kept_until_answered_and_cut_to_their_limit() {
    let mut southbound = Southbound {
        connection: Connection::new(
            &sb::DATABASE,
            sb::conditions(),
            &Remotes::unix(SB_SOCKETS),
            SB_OPTION,
        ),
        converter: Converter::new(sb::DATABASE.name, Arc::default()),
        samples: BTreeSet::new(),
        watched: None,
    };
    let stage = Stage::Table(Pipeline::Egress, 4);
    let ask = OvnCommand::SampleLogicalFlows(stage);
    southbound.command(ask.clone());
    southbound.command(ask);
    assert_eq!(southbound.samples.len(), 1);
    let rows = (0..1000u16).map(|row| Uuid::new(row.into()));
    let answer = || Event::Selected {
        tag: tag(stage),
        rows: Ok(rows.clone().collect()),
    };
    // An answer without a connection belongs to nothing.
    assert!(southbound.event(answer()).is_empty());
    assert_eq!(southbound.samples.len(), 1);
    let news = southbound.selected(tag(stage), Ok(rows.collect()));
    let [
        Input::LogicalFlowSample {
            stage: sampled,
            flows,
        },
    ] = &news[..]
    else {
        panic!("no sample")
    };
    assert_eq!(*sampled, stage);
    assert_eq!(flows.len(), LOGICAL_FLOW_SAMPLE_MAX);
    assert!(southbound.samples.is_empty());
    let again = southbound.selected(tag(stage), Ok(Vec::new()));
    assert!(again.is_empty(), "nobody asked again");
}
