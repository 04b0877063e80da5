"""Bugs that the models must detect: one ordering, fence or exchange weaker than required."""

import re
from typing import NamedTuple


class Bug(NamedTuple):
    model: str
    why: str
    path: str
    right: str
    wrong: str

    @property
    def package(self):
        crate = re.match(r"crates/([^/]+)/", self.path)
        return crate[1] if crate else "weft"


def relaxed(model, why, path, right):
    """A step with all its orderings relaxed."""
    return Bug(model, why, path, right, re.sub(r"\bOrdering::(Release|Acquire|AcqRel|SeqCst)\b", "Ordering::Relaxed", right))


S = "crates/softverbs/src/"
R = S + "receive_ring/"
B = "crates/biased-lock/src/"

VISITS = "a_visitor_excludes_the_owner_of_the_bias"
TRIES = "a_trial_excludes_the_owner_of_the_bias"
MOVES = "the_bias_moves"
NO_LIGHT_HERE = ("loom::sync::atomic::fence(Ordering::SeqCst);\n    compiler_fence", "compiler_fence")
NO_HEAVY_HERE = ("    loom::sync::atomic::fence(Ordering::SeqCst);\n    fence(Ordering::SeqCst);\n    if", "    ();\n    if")

RING = "ring::messages_arrive_whole_in_order_and_their_slots_are_used_again"
ROOM = "ring::a_sender_that_waits_for_room_finds_it_or_is_rung"
AGAIN = "ring::a_sender_that_waits_for_room_once_more_finds_it_or_is_rung"
LOCK = "lock::the_lock_of_a_process_excludes"
STRIPE = "lock::the_lock_of_an_address_excludes_processes"
REMOTE = "region::no_initiator_uses_memory_after_its_deregistration"
RIGHT = "region::no_initiator_uses_memory_after_the_end_of_its_right"
NEXT_KEY = "region::the_key_in_an_ended_process_s_hazard_is_awaited_for_the_next_one"
NEXT_WORD = "region::another_key_in_the_word_of_an_ended_process_is_awaited"
LOCAL = "region::a_local_key_leads_to_its_own_region_or_nowhere"
OWN = "region::no_thread_of_the_owner_uses_memory_after_its_deregistration"
TWO_MARKS = "region::a_holder_that_another_thread_has_marked_is_awaited"
SEEN = "region::a_region_that_was_seen_is_not_found_behind_its_change"
CHANGED = "region::a_key_whose_region_changes_leads_to_one_or_the_other"
SLEEP = "signal::a_process_that_sleeps_finds_its_work_or_is_rung"
ONE = "signal::of_several_suppliers_one_rings"
ARMED = "signal::an_armed_queue_has_its_message_or_is_rung"
CREDIT = "signal::a_sender_without_a_receive_finds_one_or_is_rung"
FAILED = "signal::a_failed_queue_pair_stays_failed_and_its_owner_hears_of_it"
CLAIM = "srq::each_receive_is_claimed_once_and_the_owner_knows_by_whom"
ROUND = "srq::a_late_claimant_finds_the_receive_of_the_next_round"
SKIPPED = "srq::a_place_that_was_not_looked_at_is_used_again"
NO_ROOM = "srq::a_receive_that_can_t_be_written_has_no_room"
SHARED = "srq::senders_without_a_shared_receive_find_one_or_are_rung"
LATER_RECEIVE = "srq::a_sender_that_sleeps_is_rung_by_a_later_receive"
TAKEN_LATE = "srq::a_sender_whose_name_is_taken_late_is_rung"
BOTH_RUNG = "srq::both_queue_pairs_of_a_process_find_a_receive_or_are_rung"
PULL_ENDS = "srq::a_sender_that_waits_while_a_pull_ends_finds_a_receive_or_is_rung"
PENDING = "pending::what_was_not_taken_back_was_delivered_once"
FAILS = "pending::a_sender_that_fails_knows_what_was_delivered"
LATER = "pending::a_message_of_an_earlier_time_is_not_taken_for_a_later_one"
HELD = "pending::the_receive_of_a_held_message_is_written_by_its_holder_alone"
TAKEN_OVER = "lock::the_lock_of_one_that_has_ended_is_taken_over_once"
BUFFERS = "buffers::an_entry_is_of_one_buffer"
OWN_RING = "receive_ring::messages_arrive_whole_in_order_and_their_slots_are_used_again"
OWN_ROOM = "receive_ring::a_sender_that_waits_for_room_finds_it_or_is_rung"
COLD = "receive_ring::a_ring_that_becomes_cold_has_its_message_or_an_arrival"
ARRIVAL = "receive_ring::no_arrival_is_lost_while_others_are_taken"
ENDING = "receive_ring::a_ring_ends_behind_its_last_message"
ENDING_SLEEP = "receive_ring::the_end_of_the_last_message_is_found_or_rung"
ENDING_FULL = "receive_ring::the_end_of_a_post_without_room_is_found_or_rung"
FORSAKEN = "receive_ring::a_sender_that_waits_for_room_finds_the_end_or_is_rung"
GROWS = "receive_ring::messages_arrive_in_order_when_the_ring_grows"
GROWS_COLD = "receive_ring::a_ring_that_grows_and_becomes_cold_has_its_message_or_an_arrival"
MOVED = "receive_ring::a_sender_that_has_moved_is_rung"
MOVED_CONSUME = "receive_ring::a_consume_rings_a_sender_that_has_moved"
ASKED = "receive_ring::a_sender_that_asks_before_it_moves_is_rung"
PADDING = "receive_ring::padding_is_never_found_alone"
RING_REQUEST = "signal::a_sender_that_requests_a_ring_finds_it_or_is_rung"
STRONGER = "signal::a_late_weaker_request_replaces_no_stronger_one"
LAST_STATE = "closing::who_finds_the_state_unchanged_was_heard"
LAST_STAMP = "closing::who_finds_the_stamp_unchanged_was_heard"

NAME_BEHIND = (
    "        signal::name_waiter(map, self.at + layout::WAITERS, slot);\n        let now = signal::ask_in_turn(map, self.at + layout::WAITING);\n",
    "        let now = signal::ask_in_turn(map, self.at + layout::WAITING);\n        signal::name_waiter(map, self.at + layout::WAITERS, slot);\n",
)
NAMES_BEFORE = (
    "    asked_in_turn(map, at).then(|| take_waiters(map, names))",
    "    let words = take_waiters(map, names);\n    asked_in_turn(map, at).then_some(words)",
)
NO_LIGHT = "        fence(Ordering::SeqCst);\n    }\n}", "    }\n}"
NO_HAZARD_FENCE = (
    "store(what.to_word(), Ordering::Relaxed);\n        fence(Ordering::SeqCst);\n",
    "store(what.to_word(), Ordering::Relaxed);\n",
)
NO_WAIT_ACQUIRE = ("'s next steps.\n    fence(Ordering::Acquire);\n", "'s next steps.\n")
NO_HEAVY = "pub(crate) fn heavy_fence() {\n    fence(Ordering::SeqCst);", "pub(crate) fn heavy_fence() {\n    if true { return; }"

USED = "what_is_used_stays_until_the_last_has_done_with_it"
LATE_HIT = "a_late_hit_gets_no_other_registration"
ONCE = "one_that_is_killed_and_evicted_goes_once"
E = "src/mr/cache/entry.rs"
C = "src/mr/cache/mod.rs"

SLOTS = "slots_go_from_the_poster_to_the_poller_and_back"
RETURNED = "returned_slots_of_shared_receives_are_taken_once"
COMPLETED = "a_completed_shared_receive_is_the_posted_one"
TWICE = "a_shared_receive_completes_once"
FREE = "src/queue/srx_slots.rs"

FOLLOWED = "a_descriptor_is_followed_before_the_close_or_refused"
NEXT_SLOT = "a_slot_of_another_thread_hides_no_descriptor"
CROWD = "a_descriptor_without_a_place_is_followed_before_the_close_or_refused"
F = "src/mr/following.rs"
NO_FOLLOW_FENCE = ("`mark_changed` has the other fence.\n        fence(Ordering::SeqCst);", "`mark_changed` has the other fence.")
NO_CLOSE_FENCE = ("`Following::follow` has the other fence\n    fence(Ordering::SeqCst);", "`Following::follow` has the other fence")


def no_fences(model):
    """The asymmetric barrier without its light fence, and without its heavy one."""
    return Bug(model, "no light fence", S + "sync.rs", *NO_LIGHT), Bug(model, "no heavy fence", S + "sync.rs", *NO_HEAVY)


WEAKENED = [
    relaxed(SLOTS, "a request entered with Relaxed", "src/queue/slots.rs", "self.head.store(head.wrapping_add(1), Ordering::Release)"),
    relaxed(SLOTS, "requests looked for with Relaxed", "src/queue/slots.rs", "        let mut tail = self.tail.load(Ordering::Relaxed);\n        let head = self.head.load(Ordering::Acquire);"),
    relaxed(SLOTS, "a slot given back with Relaxed", "src/queue/slots.rs", "self.tail.store(tail, Ordering::Release)"),
    relaxed(SLOTS, "room looked for with Relaxed", "src/queue/slots.rs", "    pub(crate) fn is_full(&self) -> bool {\n        let tail = self.tail.load(Ordering::Acquire);"),
    relaxed(RETURNED, "a slot returned with Relaxed", FREE, "                number,\n                Ordering::Release,"),
    relaxed(RETURNED, "the first free slot read with Relaxed", FREE, "let mut number = self.free.load(Ordering::Acquire);"),
    Bug(RETURNED, "a slot returned meanwhile read with Relaxed", FREE, "                Ordering::Acquire,\n                Ordering::Acquire,", "                Ordering::Acquire,\n                Ordering::Relaxed,"),
    Bug(RETURNED, "a slot returned without an exchange", FREE, "            match self.free.compare_exchange_weak(\n                first,\n                number,\n                Ordering::Release,\n                Ordering::Relaxed,\n            ) {", "            self.free.store(number, Ordering::Release);\n            match Ok::<u32, u32>(first) {"),
    relaxed(COMPLETED, "a receive posted with Relaxed", FREE, "slot.posted.store(true, Ordering::Release)"),
    relaxed(COMPLETED, "a posted receive looked for with Relaxed", FREE, "slot.posted.swap(false, Ordering::Acquire)"),
    Bug(TWICE, "a receive completed without an exchange", FREE, "!slot.posted.swap(false, Ordering::Acquire)", "!{ let posted = slot.posted.load(Ordering::Acquire); slot.posted.store(false, Ordering::Relaxed); posted }"),
    relaxed(USED, "a reference given back with Relaxed", E, "self.state.fetch_sub(1, Ordering::Release)"),
    relaxed(USED, "the last reference claimed with Relaxed", E, "compare_exchange(state, state | QUEUED, Ordering::AcqRel"),
    Bug(USED, "the last but one reference counts as the last", E, "left & REFS == 0 && self.claim(left)", "left & REFS <= 1 && self.claim(left)"),
    Bug(USED, "references not looked at by who kills", E, "state & (REFS | QUEUED) == 0 && self.claim(state)", "state & QUEUED == 0 && self.claim(state)"),
    relaxed(USED, "a dead one handed over with Relaxed", C, "let (set, read) = (Ordering::Release, Ordering::Relaxed);"),
    relaxed(USED, "dead ones taken with Relaxed", C, "self.inner.zombies.swap(NONE, Ordering::Acquire)"),
    Bug(LATE_HIT, "a dead one gives references", E, "old >> 32 == word.generation() && old & DEAD == 0", "old >> 32 == word.generation()"),
    Bug(LATE_HIT, "a generation that does not change", E, "let more = (1_u64 << 32).wrapping_sub(QUEUED | DEAD) + 1;", "let more = 0_u64.wrapping_sub(QUEUED | DEAD) + 1;"),
    Bug(ONCE, "claimed without an exchange", E, "        self.state\n            .compare_exchange(state, state | QUEUED, Ordering::AcqRel, Ordering::Relaxed)\n            .is_ok()\n", "        self.state.store(state | QUEUED, Ordering::Release);\n        true\n"),
    relaxed(RING, "a message published with Relaxed", S + "ring/producer.rs", "store(first, Ordering::Release)"),
    relaxed(RING, "a message looked at with Relaxed", S + "ring/consumer.rs", "let first = first.load(Ordering::Acquire);"),
    relaxed(RING, "the place told with Relaxed", S + "ring/consumer.rs", "store(self.tail, Ordering::Release)"),
    relaxed(RING, "the place read with Relaxed", S + "ring/producer.rs", "self.map.u32(CONSUMED_AT).load(Ordering::Acquire)"),
    Bug(ROOM, "no light fence", S + "sync.rs", *NO_LIGHT),
    Bug(ROOM, "no fence of who asks", S + "ring/producer.rs", "        light_fence(true);\n        let look = may_sleep();\n        if look {\n            heavy_fence();\n        }\n        look\n", "        let _ = (light_fence, heavy_fence);\n        may_sleep()\n"),
    Bug(AGAIN, "no second look", S + "ring/producer.rs", "        look\n    }\n}", "        false\n    }\n}"),
    relaxed(LOCK, "taken with Relaxed", S + "sync.rs", "compare_exchange(0, 1, Ordering::Acquire"),
    relaxed(LOCK, "released with Relaxed", S + "sync.rs", "const RELEASE: Ordering = Ordering::Release;"),
    relaxed(STRIPE, "taken with Relaxed", S + "region/atomic.rs", "compare_exchange(held, own, Ordering::SeqCst"),
    relaxed(STRIPE, "released with Relaxed", S + "region/atomic.rs", "compare_exchange(self.own, 0, Ordering::Release"),
    Bug(REMOTE, "no fence behind the hazard", S + "hazard.rs", *NO_HAZARD_FENCE),
    Bug(REMOTE, "no fence behind the key's end", S + "region/table.rs", "        fence(Ordering::SeqCst);\n", ""),
    relaxed(REMOTE, "the hazard cleared with Relaxed", S + "hazard.rs", "self.word.store(0, Ordering::Release)"),
    Bug(REMOTE, "no acquire behind the wait", S + "hazard.rs", *NO_WAIT_ACQUIRE),
    Bug(REMOTE, "hazards not looked at", S + "hazard.rs", "while let Some(found) = find() {", "while let Some(found) = find().filter(|_| false) {"),
    Bug(RIGHT, "no fence behind the hazard", S + "hazard.rs", *NO_HAZARD_FENCE),
    Bug(RIGHT, "no fence behind the new state", S + "hazard.rs", "    fence(Ordering::SeqCst);\n    wait_for(segment, |used| used.names_access(qp, rights), lives)", "    wait_for(segment, |used| used.names_access(qp, rights), lives)"),
    relaxed(RIGHT, "the hazard cleared with Relaxed", S + "hazard.rs", "self.word.store(0, Ordering::Release)"),
    Bug(RIGHT, "no acquire behind the wait", S + "hazard.rs", *NO_WAIT_ACQUIRE),
    Bug(RIGHT, "the state not looked at", S + "hazard.rs", "        self.state.load(Ordering::Acquire) == self.word.0\n", "        true\n"),
    Bug(RIGHT, "other hazards looked at", S + "hazard.rs", "== u64::from(qp) + 1 && self.0 & rights_bits(rights) != 0", "== u64::from(qp)"),
    Bug(NEXT_KEY, "no fence behind the hazard", S + "hazard.rs", *NO_HAZARD_FENCE),
    Bug(NEXT_KEY, "no fence behind the key's end", S + "region/table.rs", "        fence(Ordering::SeqCst);\n", ""),
    Bug(NEXT_WORD, "a word cleared whatever it holds", S + "hazard.rs", "let _ = word.compare_exchange(self.used.to_word(), 0, relaxed, relaxed);", "word.store(0, relaxed);"),
    Bug(REMOTE, "a key that does not change", S + "region/table.rs", "            generation + 1\n", "            generation\n"),
    Bug(OWN, "no fence behind the key's end", S + "region/table.rs", "        fence(Ordering::SeqCst);\n", ""),
    Bug(OWN, "the holder not awaited", S + "sync.rs", "                Ok(_) => mark.0,", "                Ok(_) => return None,"),
    Bug(OWN, "no acquire behind the wait", S + "hazard.rs", *NO_WAIT_ACQUIRE),
    Bug(OWN, "no exchange where a thread lets another one pass", S + "sync.rs", "self.held.swap(HELD, Ordering::AcqRel);", "self.held.swap(HELD, Ordering::Relaxed);"),
    Bug(TWO_MARKS, "no fence where a thread lets others pass", S + "sync.rs", "self.held.swap(HELD, Ordering::AcqRel);\n        // before the later look-ups, as acquiring the lock is\n        fence(Ordering::SeqCst);", "self.held.swap(HELD, Ordering::AcqRel);"),
    Bug(LOCAL, "the second look before the words", S + "region/table.rs", "        fence(Ordering::Acquire);\n        let unchanged", "        let unchanged"),
    Bug(LOCAL, "no second look", S + "region/table.rs", "let unchanged = entry.version.load(Ordering::Relaxed) == version;", "let unchanged = true;"),
    Bug(CHANGED, "the version counted behind the words", S + "region/table.rs", "        self.version.fetch_add(1, Ordering::Relaxed);\n        fence(Ordering::Release);\n", "        fence(Ordering::Release);\n"),
    Bug(CHANGED, "no second look at the version", S + "region/table.rs", "let unchanged = entry.version.load(Ordering::Relaxed) == version;", "let unchanged = true;"),
    Bug(CHANGED, "no fence behind the version", S + "region/table.rs", "        fence(Ordering::Release);\n        self.access", "        self.access"),
    Bug(SEEN, "keys that end are not counted", S + "region/table.rs", "        self.changes.fetch_add(1, Ordering::Release);\n", ""),
    Bug(SEEN, "the count read behind the table", S + "region/last_region.rs", "                changes,\n", "                changes: self.changes.load(Ordering::Acquire),\n"),
    Bug(SLEEP, "no fence of who rings", S + "signal.rs", "pub(crate) fn must_ring(map: &Mapping) -> bool {\n    fence(Ordering::SeqCst);", "pub(crate) fn must_ring(map: &Mapping) -> bool {"),
    Bug(SLEEP, "no heavy fence", S + "sync.rs", *NO_HEAVY),
    Bug(ONE, "the word cleared without an exchange", S + "signal.rs", "word.load(Ordering::Relaxed) != 0 && word.swap(0, Ordering::AcqRel) != 0", "word.load(Ordering::Relaxed) != 0 && { word.store(0, Ordering::Release); true }"),
    *no_fences(ARMED),
    *no_fences(CREDIT),
    Bug(FAILED, "no fence behind the count", S + "signal.rs", "        self.seen.store(count, Ordering::Relaxed);\n        fence(Ordering::SeqCst);", "        self.seen.store(count, Ordering::Relaxed);"),
    Bug(FAILED, "the state stored, not exchanged", S + "signal.rs", "    map.u64(at + qp::STATE)\n        .compare_exchange(from.0, to.0, Ordering::AcqRel, Ordering::Relaxed)\n        .is_ok()", "    let word = map.u64(at + qp::STATE);\n    word.load(Ordering::Acquire) == from.0 && { word.store(to.0, Ordering::Release); true }"),
    Bug(FAILED, "called before moved", S + "signal.rs", "    map.u64(at + qp::STATE)\n        .compare_exchange(from.0,", "    call_attention(map);\n    map.u64(at + qp::STATE)\n        .compare_exchange(from.0,"),
    relaxed(CLAIM, "a receive appended with Relaxed", S + "srq/order.rs", "store(Word::posted(self.head, index, room).0, Ordering::Release)"),
    relaxed(CLAIM, "a claim with Relaxed", S + "srq/shared.rs", "if map\n                .u64(place)\n                .compare_exchange(word.0, claimed, Ordering::AcqRel"),
    relaxed(CLAIM, "a quick claim with Relaxed", S + "srq/shared.rs", "&& cell\n                .compare_exchange(word.0, claimed, Ordering::AcqRel"),
    Bug(CLAIM, "a quick claim without an exchange", S + "srq/shared.rs", "            && cell\n                .compare_exchange(word.0, claimed, Ordering::AcqRel, Ordering::Relaxed)\n                .is_ok();\n        if !first {\n", "            ;\n        if first {\n            cell.store(claimed, Ordering::Release);\n        } else {\n"),
    Bug(SKIPPED, "a claim that a message told of is followed once more", S + "srq/order.rs", "    pub(crate) fn skip(&mut self) {\n        self.followed = self.followed.wrapping_add(1);", "    pub(crate) fn skip(&mut self) {"),
    Bug(NO_ROOM, "a room that stays", S + "srq/order.rs", "let bare = Word::posted(position, index, 0).0;", "let bare = word.0;"),
    Bug(NO_ROOM, "a room taken back without an exchange", S + "srq/order.rs", "                let _ = cell.compare_exchange(word.0, bare, Ordering::Release, Ordering::Relaxed);\n", "                cell.store(bare, Ordering::Release);\n"),
    Bug(CLAIM, "a claim without an exchange", S + "srq/shared.rs", "            if map\n                .u64(place)\n                .compare_exchange(word.0, claimed, Ordering::AcqRel, Ordering::Relaxed)\n                .is_ok()\n", "            map.u64(place).store(claimed, Ordering::Release);\n            if true\n"),
    Bug(ROUND, "a late claimant gives up", S + "srq/shared.rs", "            if ahead > 0 {\n                position = word.position().wrapping_sub(self.mask);\n                continue;", "            if ahead > 0 {\n                return None;"),
    *no_fences(SHARED),
    Bug(SHARED, "no second look where somebody else asks", S + "srq/shared.rs", "        let now = signal::ask_in_turn(", "        if map.u32(self.at + layout::WAITING).load(Ordering::Relaxed) & 1 != 0 {\n            return false;\n        }\n        let now = signal::ask_in_turn("),
    Bug(SHARED, "a turn that comes back", S + "signal.rs", "turn.wrapping_add(1),", "turn.wrapping_sub(1),"),
    *no_fences(LATER_RECEIVE),
    Bug(LATER_RECEIVE, "the name behind the turn", S + "srq/shared.rs", *NAME_BEHIND),
    Bug(LATER_RECEIVE, "the names taken before the turn", S + "signal.rs", *NAMES_BEFORE),
    Bug(LATER_RECEIVE, "the names taken without an exchange", S + "signal.rs", "word.swap(0, Ordering::AcqRel))\n}", "{ let names = word.load(Ordering::Acquire); word.store(0, Ordering::Release); names })\n}"),
    Bug(TAKEN_LATE, "no second look in a later turn", S + "srq/shared.rs", "std::mem::replace(turn, now) != now", "std::mem::replace(turn, now) & 0 != 0"),
    Bug(TAKEN_LATE, "the names taken before the turn", S + "signal.rs", *NAMES_BEFORE),
    Bug(BOTH_RUNG, "no second look in a later turn", S + "srq/shared.rs", "std::mem::replace(turn, now) != now", "std::mem::replace(turn, now) & 0 != 0"),
    Bug(BOTH_RUNG, "a word without names is not exchanged", S + "signal.rs", "        .map(|word| word.swap(0, Ordering::AcqRel))", "        .map(|word| if word.load(Ordering::Relaxed) == 0 { 0 } else { word.swap(0, Ordering::AcqRel) })"),
    relaxed(BOTH_RUNG, "the names taken with Relaxed", S + "signal.rs", "word.swap(0, Ordering::AcqRel))\n}"),
    relaxed(BOTH_RUNG, "a name looked for with Relaxed", S + "signal.rs", "word.load(Ordering::Acquire) & bit == 0"),
    relaxed(BOTH_RUNG, "a name added with Relaxed", S + "signal.rs", "word.fetch_or(bit, Ordering::AcqRel);"),
    Bug(PULL_ENDS, "no fence between the request at the queue pair and the turn", S + "signal.rs", "    if fresh {\n        fence(Ordering::SeqCst);\n    }\n    fresh\n", "    fresh\n"),
    Bug(PULL_ENDS, "no fence behind the withdrawal", S + "signal.rs", "    asked_in_turn(map, at);\n    fence(Ordering::SeqCst);\n    if !waits()", "    asked_in_turn(map, at);\n    if !waits()"),
    Bug(PULL_ENDS, "no second look at those that wait", S + "signal.rs", "    if !waits() {\n        return false;\n    }\n    ask_in_turn(map, at);\n    true\n", "    false\n"),
    relaxed(PENDING, "messages shown with Relaxed", S + "qp/pending_word.rs", "map.u64(at).store(word.0, Ordering::Release)"),
    relaxed(PENDING, "one added with Relaxed", S + "qp/pending_word.rs", "compare_exchange(old.0, new.0, Ordering::AcqRel"),
    relaxed(PENDING, "looked at with Relaxed", S + "qp/pending_word.rs", "    PendingWord(map.u64(at).load(Ordering::Acquire))\n}"),
    relaxed(PENDING, "taken with Relaxed", S + "qp/pending_word.rs", "compare_exchange(word.0, rest, Ordering::AcqRel"),
    relaxed(PENDING, "taken back with Relaxed", S + "qp/pending_word.rs", "compare_exchange(now.0, empty.0, Ordering::AcqRel, Ordering::Acquire)"),
    Bug(PENDING, "what is taken is not counted", S + "qp/pending_word.rs", "map_or(0, |word| word.taken(now))", "map_or(0, |_| 0)"),
    relaxed(FAILS, "withdrawn with Relaxed", S + "qp/pending_word.rs", "swap(empty.0, Ordering::AcqRel)"),
    Bug(LATER, "a generation that does not change", S + "qp/pending_word.rs", "        self.generation = empty.generation();\n        Some(self.count(now))", "        Some(self.count(now))"),
    Bug(HELD, "taken back although it is held", S + "qp/pending_word.rs", "            if now.is_held() {\n                return None;\n            }\n", ""),
    relaxed(HELD, "let go with Relaxed", S + "qp/pending_word.rs", "compare_exchange(word.0, free, Ordering::AcqRel"),
    Bug(HELD, "held without an exchange", S + "qp/pending_word.rs", "    map.u64(at)\n        .compare_exchange(word.0, word.held().0, Ordering::AcqRel, Ordering::Relaxed)\n        .is_ok()\n", "    map.u64(at).store(word.held().0, Ordering::Release);\n    true\n"),
    Bug(TAKEN_OVER, "taken over without an exchange", S + "region/atomic.rs", "            if free\n                && word\n                    .compare_exchange(held, own, Ordering::SeqCst, Ordering::Relaxed)\n                    .is_ok()\n            {", "            if free {\n                word.store(own, Ordering::SeqCst);"),
    Bug(BUFFERS, "no second look", S + "dm/mod.rs", "(map.u64(at + layout::STAMP).load(Ordering::Relaxed) == stamp).then_some(shown)", "Some(shown)"),
    Bug(BUFFERS, "no fence before the second look", S + "dm/mod.rs", "        fence(Ordering::Acquire);\n", ""),
    Bug(BUFFERS, "no fence behind the old stamp", S + "dm/mod.rs", "        fence(Ordering::Release);\n", ""),
    relaxed(BUFFERS, "the stamp stored with Relaxed", S + "dm/mod.rs", "store(stamp, Ordering::Release)"),
    relaxed(OWN_RING, "a message published with Relaxed", R + "sender.rs", "word.store(first, Ordering::Release);\n        self.pass(slots);\n    }\n\n    /// Goes behind"),
    relaxed(OWN_RING, "a message polled with Relaxed", R + "receiver.rs", "        let at = self.next_at();\n        let first = self.map.u64(at).load(Ordering::Acquire);"),
    relaxed(OWN_RING, "the position stored with Relaxed", R + "receiver.rs", "store(self.tail, Ordering::Release)"),
    relaxed(OWN_RING, "the position read with Relaxed", R + "sender.rs", "consumed.load(Ordering::Acquire)"),
    *no_fences(OWN_ROOM),
    *no_fences(COLD),
    Bug(ARRIVAL, "the summary bit before the bit", R + "arrivals.rs", "    map.u64(at + WORDS_AT + 8 * word)\n        .fetch_or(1 << (index % 64), Ordering::AcqRel);\n    map.u64(at + 8 * (word / 64))\n        .fetch_or(1 << (word % 64), Ordering::AcqRel);", "    map.u64(at + 8 * (word / 64))\n        .fetch_or(1 << (word % 64), Ordering::AcqRel);\n    map.u64(at + WORDS_AT + 8 * word)\n        .fetch_or(1 << (index % 64), Ordering::AcqRel);"),
    Bug(ARRIVAL, "a summary word cleared without an exchange", R + "arrivals.rs", "let mut words = summary.fetch_and(!mask, Ordering::AcqRel) & mask;", "let old = summary.load(Ordering::Acquire); summary.store(old & !mask, Ordering::Release); let mut words = old & mask;"),
    Bug(ARRIVAL, "bits cleared without an exchange", R + "arrivals.rs", "let found = bits.fetch_and(!mask, Ordering::AcqRel);", "let found = bits.load(Ordering::Acquire); bits.store(found & !mask, Ordering::Release);"),
    Bug(ARRIVAL, "bits that stay have no summary bit", R + "arrivals.rs", "refused.is_break() || found & !mask != 0", "refused.is_break()"),
    Bug(ENDING, "no light fence", R + "usage.rs", "known_light_fence(self.light);\n        let usage", "let usage"),
    Bug(ENDING, "no heavy fence", S + "sync.rs", *NO_HEAVY),
    relaxed(ENDING, "the usage ended with Relaxed", R + "usage.rs", "store(0, Ordering::Release)"),
    relaxed(ENDING, "the usage read with Relaxed", R + "usage.rs", "map.u64(at + layout::RING_USE).load(Ordering::Acquire)"),
    Bug(ENDING_SLEEP, "no light fence behind the usage", R + "usage.rs", "        drop(usage);\n        known_light_fence(self.light);\n        let connected = self.is_connected();\n        if signal", "        drop(usage);\n        let connected = self.is_connected();\n        if signal"),
    Bug(ENDING_SLEEP, "a message that is not solicited wakes no receiver", R + "usage.rs", "solicited || !connected", "solicited"),
    Bug(ENDING_SLEEP, "a usage in vain wakes no receiver", R + "usage.rs", "        self.release(usage, ring);\n        None", "        drop((usage, ring));\n        None"),
    Bug(ENDING_FULL, "no light fence behind the usage", R + "usage.rs", "        drop(usage);\n        known_light_fence(self.light);\n        let connected = self.is_connected();\n        // The", "        drop(usage);\n        let connected = self.is_connected();\n        // The"),
    Bug(ENDING_FULL, "no wake-up without a message", R + "usage.rs", "!connected && signal", "false && signal"),
    Bug(FORSAKEN, "no light fence", S + "sync.rs", *NO_LIGHT),
    Bug(FORSAKEN, "no look at the state behind the request", R + "usage.rs", "        heavy_fence();\n        self.release(usage, ring)\n", "        heavy_fence();\n        drop((usage, ring));\n        true\n"),
    Bug(PADDING, "padding before its message", R + "sender.rs", "        self.pass(pad);\n        let at = self.ring.place(self.head) + SLOT;\n        self.put(words, len, slots, fill);", "        let early = u64::from(sequence(pads)) | u64::from(PAD) << 32;\n        if pad > 0 {\n            self.ring.map().u64(self.ring.place(pads)).store(early, Ordering::Release);\n        }\n        self.pass(pad);\n        let at = self.ring.place(self.head) + SLOT;\n        self.put(words, len, slots, fill);"),
    Bug(GROWS, "a larger ring shown before it is cleared", R + "receiver.rs", "        fence(Ordering::Release);\n        self.prepare(larger);\n        self.larger = Some(larger);\n        show();\n", "        show();\n        fence(Ordering::Release);\n        self.prepare(larger);\n        self.larger = Some(larger);\n"),
    Bug(GROWS, "no position at the marker", R + "sender.rs", "        self.head = self.head.wrapping_add(1);\n        self.former", "        self.former"),
    *no_fences(GROWS_COLD),
    Bug(GROWS_COLD, "the first ring alone made cold", R + "receiver.rs", "std::iter::once(self.at).chain(larger)", "std::iter::once(self.at).chain(larger.filter(|_| hot))"),
    Bug(GROWS_COLD, "no marker before the message", R + "sender.rs", "            .store(first, Ordering::Release);\n        self.head = self.head.wrapping_add(1);", "            .store(first & 0, Ordering::Release);\n        self.head = self.head.wrapping_add(1);"),
    *no_fences(MOVED),
    Bug(MOVED, "the position behind the marker is not published", R + "receiver.rs", "        self.advance_by(1);\n        Stop::Moved", "        self.tail = self.tail.wrapping_add(1);\n        Stop::Moved"),
    Bug(MOVED, "the position published behind the look", R + "receiver.rs", "        let former = self.former;\n        let before = former.is_some_and(|at| is_awaited(&self.map, at + WAITING_AT));\n        self.sender_waits() || before", "        let word = self.map.u32(self.at + CONSUMED_AT);\n        word.store(self.tail.wrapping_sub(1), Ordering::Relaxed);\n        let former = self.former;\n        let before = former.is_some_and(|at| is_awaited(&self.map, at + WAITING_AT));\n        let waits = self.sender_waits() || before;\n        word.store(self.tail, Ordering::Release);\n        waits"),
    Bug(MOVED_CONSUME, "the request in the larger ring alone", R + "sender.rs", "std::iter::once(self.at).chain(former)", "std::iter::once(self.at).chain(former.filter(|_| false))"),
    Bug(MOVED_CONSUME, "no look at the first ring", R + "sender.rs", "        self.look_at(former.at);\n", ""),
    Bug(ASKED, "no look at the request in the first ring", R + "receiver.rs", "self.sender_waits() || before", "self.sender_waits() || before && false"),
    Bug(RING_REQUEST, "no second look behind the request", S + "signal.rs", "    if there() {\n        return true;\n    }\n    call();", "    call();"),
    Bug(RING_REQUEST, "no fence behind the request", S + "signal.rs", "    fence(Ordering::SeqCst);\n    if there() {", "    if there() {"),
    Bug(RING_REQUEST, "no fence behind the grant", S + "signal.rs", "    fence(Ordering::SeqCst);\n    wanted.load", "    wanted.load"),
    relaxed(RING_REQUEST, "a ring granted with Relaxed", S + "signal.rs", "granted.store(cookie, Ordering::Release)"),
    relaxed(RING_REQUEST, "a ring looked for with Relaxed", S + "signal.rs", "granted.load(Ordering::Acquire) == cookie"),
    Bug(STRONGER, "the request stored", S + "signal.rs", "fetch_max(armed, Ordering::SeqCst)", "store(armed, Ordering::SeqCst)"),
    *no_fences(LAST_STATE),
    *no_fences(LAST_STAMP),
    Bug(FOLLOWED, "no fence behind the descriptor", F, *NO_FOLLOW_FENCE),
    Bug(FOLLOWED, "no fence behind the mark", F, *NO_CLOSE_FENCE),
    relaxed(FOLLOWED, "a descriptor removed with Relaxed", F, "desc.store(0, Ordering::Release);"),
    relaxed(FOLLOWED, "a descriptor looked for with Relaxed", F, ".any(|desc| desc.load(Ordering::Acquire) == addr)"),
    relaxed(FOLLOWED, "a slot given back with Relaxed", F, "slot.owner.store(0, Ordering::Release);"),
    relaxed(FOLLOWED, "the owner of a slot read with Relaxed", F, "slot.owner.load(Ordering::Acquire) == now"),
    relaxed(NEXT_SLOT, "a slot claimed with Relaxed", F, ".compare_exchange(owner, now, Ordering::Acquire, Ordering::Relaxed)"),
    relaxed(NEXT_SLOT, "a descriptor published with Relaxed", F, "desc.store(addr, Ordering::Release);"),
    relaxed(CROWD, "a thread counted off with Relaxed", F, "let (set, read) = (Ordering::Release, Ordering::Relaxed);"),
    relaxed(CROWD, "the count of threads read with Relaxed", F, "crowd_of(self.crowd.load(Ordering::Acquire))"),
    Bug(VISITS, "no light fence", B + "platform.rs", *NO_LIGHT_HERE),
    Bug(VISITS, "no heavy fence", B + "platform.rs", *NO_HEAVY_HERE),
    Bug(VISITS, "no second look at the bias", B + "raw.rs", "if self.bias.load(Ordering::Acquire) == thread {", "if self.bias.load(Ordering::Acquire) == thread || true {"),
    relaxed(VISITS, "the flag cleared with Relaxed", B + "raw.rs", ".store(false, Ordering::Release);\n    }"),
    relaxed(VISITS, "the flag read with Relaxed", B + "raw.rs", "while inside.load(Ordering::Acquire)"),
    relaxed(VISITS, "the bias returned with Relaxed", B + "raw.rs", "self.bias.store(returned, Ordering::Release);"),
    Bug(VISITS, "no wait for the owner of the bias", B + "raw.rs", "while inside.load(Ordering::Acquire)", "while inside.load(Ordering::Acquire) && false"),
    Bug(TRIES, "a trial does not look at the flag", B + "raw.rs", "locked = inside.load(Ordering::Acquire);", "locked = inside.load(Ordering::Acquire) && false;"),
    Bug(TRIES, "no light fence", B + "platform.rs", *NO_LIGHT_HERE),
    Bug(MOVES, "no light fence", B + "platform.rs", *NO_LIGHT_HERE),
]
