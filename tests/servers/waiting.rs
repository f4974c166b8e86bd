//! What whoever waits for answers does meanwhile, and hears.

use std::cell::{Cell, RefCell};
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::Duration;

use gapscope::base::Contract;
use gapscope::rollout::http::{Servers, Starting, Terms, Waiting};

use crate::answers::{asked, config, generate, open, right, terms};
use crate::scripted::{Reply, Scripted};

/// Longer than any of this takes on a slow machine.
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn a_server_that_is_being_started_is_left_alone_and_costs_no_try() {
    let server = Scripted::new(|_| Reply::Right);
    let starting = Starting::default();
    let terms = Terms { starting: vec![Starting::clone(&starting)], ..terms(Contract::PLAIN) };
    let mut config = config(&[&server.url]);
    config.retry_for_s = 0.0;
    let servers = Servers::open(&config, terms, &|| false).expect("it is well");
    let before = server.asked();
    starting.store(true, Ordering::Release);
    let looks = Cell::new(0);
    let waiting = || {
        looks.set(looks.get() + 1);
        if looks.get() == 10 {
            assert_eq!(server.asked(), before, "nobody knocks");
            starting.store(false, Ordering::Release);
        }
        false
    };
    let done = servers.generate(asked(3), &Contract::PLAIN, &waiting).expect("every answer");
    assert_eq!(done, right());
    assert!(looks.get() >= 10);
}

/// One request at a time goes to each, so that the second one's being asked shows that the first
/// answer was read.
#[test]
fn answers_are_read_whatever_who_waits_is_busy_with() {
    let server = Scripted::new(|_| Reply::Right);
    let servers = open(&[&server], |config| config.max_concurrent_requests = 1).expect("well");
    let all = || server.asked().keys().filter(|name| name.starts_with("s1.")).count() == 6;
    let busy = Cell::new(true);
    let waiting = || {
        let began = std::time::Instant::now();
        while busy.get() && !all() {
            assert!(began.elapsed() < PATIENCE, "nothing is read meanwhile");
            sleep(Duration::from_millis(5));
        }
        busy.set(false);
        false
    };
    assert_eq!(servers.generate(asked(3), &Contract::PLAIN, &waiting).expect("right"), right());
    assert!(!busy.get());
}

/// Hears.
#[derive(Default)]
struct Listener(RefCell<Vec<String>>);

impl Waiting for Listener {
    fn gives_up(&self) -> bool {
        false
    }

    fn hears(&self, news: &str) {
        self.0.borrow_mut().push(news.to_owned());
    }
}

#[test]
fn a_request_that_hangs_is_told_of_and_given_up_the_second_time() {
    let server = Scripted::new(|asked| match asked.name {
        "s1.p0.r1" => Reply::Late(Duration::from_secs(600)),
        _ => Reply::Right,
    });
    // Pauses would leave time for many tries.
    let edit = |config: &mut gapscope::config::ServersConfig| {
        (config.request_timeout_s, config.retry_for_s) = (2.0, 600.0);
    };
    let servers = open(&[&server], edit).expect("well");
    let listener = Listener::default();
    let error = servers.generate(asked(1), &Contract::PLAIN, &listener).expect_err("always late");
    let error = error.to_string();
    let expected = "request s1.p0.r1, tried 2 time(s): no whole answer within 2 s; raise \
                    engine.request_timeout_s";
    assert!(error.contains(expected), "{error}");
    let told = &listener.0.borrow()[0];
    let url = &server.url;
    assert!(told.starts_with(&format!("{url}: no whole answer within 2 s to 1 request(s); ")));
    assert!(generate(&servers, 0).expect("nothing was asked").is_empty());
}
