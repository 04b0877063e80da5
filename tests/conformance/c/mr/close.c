/* SPDX-License-Identifier: BSD-2-Clause OR GPL-2.0-only */
/* fi_close(3) of memory regions, as fi_mr(3) has it: its effect on peers and on the closing
 * process. */
#include "mr.h"

#define ROUNDS 10000

enum idle { SLEEPS, POLLS, SENDS, COMPUTES };

/* The initiator uses one region once, and then no region; the target opens and closes others. Then
 * the first region is used again. */
static void idle(enum idle how)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(2 * PAGE, true), byte = 7;
	volatile unsigned work = 0;

	if (connected(&end, form_bits())) {
		struct fid_mr *stays = reg(&end, buffer, PAGE, ALL_ACCESS, 1), *mr;
		struct times times = { 0 };
		int before = failures;
		double start;

		tell_region(&end, stays, buffer);
		mr = reg(&end, buffer + PAGE, PAGE, ALL_ACCESS, 2);
		tell_region(&end, mr, buffer + PAGE);
		meet();
		MUST(fi_close(&mr->fid));
		for (int i = 0; i < ROUNDS && failures == before; i++) {
			mr = reg(&end, buffer + PAGE, PAGE, ALL_ACCESS, 2);
			if (how == SENDS)
				MUST(fi_recv(end.ep, buffer + PAGE, 8, NULL, 0, NULL));
			start = now();
			IS(fi_close(&mr->fid), 0);
			add_time(&times, now() - start);
			if (how == SENDS) {
				tell("s", 1);
				if (completion(&end, SECONDS))
					die("a message is lost after %d closes", i);
			}
		}
		MUST_BE_SHORT(times, "a close");
		if (how == SENDS)
			tell("e", 1);
		meet();
		meet();
		HOLDS(buffer[0] == 8, "the byte written last is %d", buffer[0]);
		MUST(fi_close(&stays->fid));
	} else {
		struct remote stays = hear_region(&end), goes = hear_region(&end);
		char c;

		IS(do_write(&end, &byte, 1, &stays, 0), 0);
		IS(do_write(&end, &byte, 1, &goes, 0), 0);
		meet();
		switch (how) {
		case SLEEPS: break;
		case POLLS:
			while (!called())
				if (poll_one(&end, NULL) != -FI_EAGAIN)
					die("a completion of nothing");
			break;
		case COMPUTES:
			while (!called())
				for (unsigned i = 0; i < 1000000; i++)
					work += i;
			break;
		case SENDS:
			for (hear(&c, 1); c == 's'; hear(&c, 1))
				IS(DO(&end, fi_send(end.ep, &byte, 1, NULL, 0, NULL)), 0);
			break;
		}
		meet();
		byte = 8;
		IS(do_write(&end, &byte, 1, &stays, 0), 0);
		IS(next_event(&end, 0.1, NULL), -1);
		meet();
		forget_region(&end, &stays);
		forget_region(&end, &goes);
	}
	close_end(&end);
}

static void idle_peer_sleeps(void) { idle(SLEEPS); }
static void idle_peer_polls(void) { idle(POLLS); }
static void idle_peer_sends(void) { idle(SENDS); }
static void idle_peer_computes(void) { idle(COMPUTES); }

/* As idle(), with a region that stays open and is refreshed. */
static void idle_peer_while_refreshed(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true), byte = 7;

	if (pins() && strcmp(form->name, "notify"))
		skip("pages of such regions do not change");
	if (connected(&end, form_bits())) {
		struct fid_mr *mr = reg(&end, buffer, PAGE, ALL_ACCESS, 1);
		struct iovec all = { buffer, PAGE };
		struct times times = { 0 };
		double start;

		MUST(fi_mr_refresh(mr, &all, 1, 0));
		tell_region(&end, mr, buffer);
		meet();
		for (int i = 0; i < ROUNDS; i++) {
			start = now();
			MUST(fi_mr_refresh(mr, &all, 1, 0));
			add_time(&times, now() - start);
		}
		MUST_BE_SHORT(times, "a refresh");
		meet();
		meet();
		HOLDS(buffer[0] == 8, "the byte written last is %d", buffer[0]);
		MUST(fi_close(&mr->fid));
	} else {
		struct remote to = hear_region(&end);

		IS(do_write(&end, &byte, 1, &to, 0), 0);
		meet();
		meet();
		byte = 8;
		IS(do_write(&end, &byte, 1, &to, 0), 0);
		IS(next_event(&end, 0.1, NULL), -1);
		meet();
	}
	close_end(&end);
}

/* A stopped initiator may lose its connection; then both sides have FI_SHUTDOWN. */
static void stopped_peer(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(2 * PAGE, true), byte = 7;

	if (connected(&end, form_bits())) {
		struct fid_mr *stays = reg(&end, buffer, PAGE, ALL_ACCESS, 1), *mr;
		double longest = 0, start;
		int event;
		char lost;

		mr = reg(&end, buffer + PAGE, PAGE, ALL_ACCESS, 2);
		tell_region(&end, stays, buffer);
		tell_region(&end, mr, buffer + PAGE);
		meet();
		kill(initiator_pid, SIGSTOP);
		nap(0.1);
		for (int i = 0; i < ROUNDS; i++) {
			start = now();
			IS(fi_close(&mr->fid), 0);
			if (now() - start > longest)
				longest = now() - start;
			mr = reg(&end, buffer + PAGE, PAGE, ALL_ACCESS, 2);
		}
		HOLDS(longest < 5.5, "a close took %.3f s", longest);
		kill(initiator_pid, SIGCONT);
		meet();
		hear(&lost, 1);
		event = next_event(&end, lost ? 5 : 0.5, NULL);
		IS(event, lost ? FI_SHUTDOWN : -1);
		/* the end of the initiator is FI_SHUTDOWN too */
		meet();
		HOLDS(lost || buffer[0] == 8, "the byte written last is %d", buffer[0]);
		MUST(fi_close(&mr->fid));
		MUST(fi_close(&stays->fid));
	} else {
		struct remote stays = hear_region(&end), goes = hear_region(&end);
		char lost;

		IS(do_write(&end, &byte, 1, &goes, 0), 0);
		meet();
		nap(0.3);
		meet();
		byte = 8;
		lost = do_write(&end, &byte, 1, &stays, 0) != 0;
		tell(&lost, 1);
		IS(next_event(&end, lost ? 5 : 0.5, NULL), lost ? FI_SHUTDOWN : -1);
		meet();
		forget_region(&end, &stays);
		forget_region(&end, &goes);
	}
	close_end(&end);
}

/* "accesses to a closed MR from a remote peer will result in an error at the peer. The state of the
 * local endpoint will be unaffected": regions are closed while the peer writes to them (reads,
 * adds), with several operations pending. */
static void closed_in_the_middle(int op)
{
	enum { CLOSES = 200, LENGTH = 8192, WINDOW = 8 };
	struct end end = { .caps = FI_MSG | FI_RMA | FI_ATOMIC };
	uint8_t *buffer = pages(LENGTH, true), *other = pages(LENGTH, true);
	uint64_t *guard = (uint64_t *)pages(PAGE, true), mark = 0, result[WINDOW], one = 1;

	if (connected(&end, form_bits())) {
		struct fid_mr *last = reg(&end, guard, PAGE, ALL_ACCESS, 1);
		double longest = 0, start;

		tell_region(&end, last, guard);
		for (int i = 0; i < CLOSES; i++) {
			struct fid_mr *mr = reg(&end, buffer, LENGTH, ALL_ACCESS, 1000 + (uint64_t)i);

			tell_region(&end, mr, buffer);
			meet();
			nap((double)(i % 20) * 20e-6);
			start = now();
			IS(fi_close(&mr->fid), 0);
			if (now() - start > longest)
				longest = now() - start;
			/* no later write may arrive */
			memset(buffer, 0xee, LENGTH);
			nap(0.001);
			for (int n = 0; n < LENGTH && failures < 10; n++)
				HOLDS(buffer[n] == 0xee, "close %d: byte %d was written behind it", i, n);
			meet();
			IS(next_event(&end, 0, NULL), -1);
		}
		HOLDS(longest < 1, "a close took %.3f s", longest);
		printf("longest close %.6f s\n", longest);
		meet();
		IS(guard[0], CLOSES);
		MUST(fi_close(&last->fid));
	} else {
		struct remote last = hear_region(&end), to;

		for (int i = 0; i < CLOSES; i++) {
			int in_flight = 0, got = 0;
			double limit = now() + SECONDS;
			bool over = false;

			to = hear_region(&end);
			meet();
			while (!over || in_flight) {
				if (!over && in_flight < WINDOW) {
					ssize_t posted =
						op == 'w' ? fi_write(end.ep, other, LENGTH, NULL, 0, to.addr, to.key, NULL) :
						op == 'r' ? fi_read(end.ep, other, LENGTH, NULL, 0, to.addr, to.key, NULL) :
							    fi_fetch_atomic(end.ep, &one, 1, NULL, &result[in_flight], NULL, 0,
									    to.addr, to.key, FI_UINT64, FI_SUM, NULL);
					if (posted == 0)
						in_flight++;
					else if (posted == -FI_EKEYREJECTED || posted == -FI_EACCES)
						over = true;
					else if (posted != -FI_EAGAIN)
						die("close %d: a post is %zd (%s)", i, posted, fi_strerror((int)-posted));
				}
				got = poll_one(&end, NULL);
				if (got != -FI_EAGAIN) {
					in_flight--;
					over = over || got;
					if (got && got != FI_EKEYREJECTED && got != FI_EACCES)
						die("close %d: an operation ends with %d (%s)", i, got, fi_strerror(got));
				}
				if (now() > limit)
					die("close %d: no error within %d s", i, SECONDS);
			}
			mark = (uint64_t)i + 1;
			got = do_write(&end, &mark, sizeof mark, &last, 0);
			if (got)
				die("close %d: the connection is of no use: %d (%s)", i, got, fi_strerror(got));
			forget_region(&end, &to);
			meet();
		}
		IS(next_event(&end, 0.1, NULL), -1);
		meet();
		forget_region(&end, &last);
	}
	close_end(&end);
}

static void closed_while_written(void) { closed_in_the_middle('w'); }
static void closed_while_read(void) { closed_in_the_middle('r'); }
static void closed_while_added_to(void) { closed_in_the_middle('a'); }

/* "release all resources": the memory of the process does not grow with the number of regions
 * opened and closed. */
static long resident_kib(void)
{
	FILE *file = fopen("/proc/self/statm", "r");
	long total, resident;

	if (fscanf(file, "%ld %ld", &total, &resident) != 2)
		die("statm");
	fclose(file);
	return resident * (long)(PAGE >> 10);
}

static void closing_releases_all(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(16 * PAGE, true);
	long before = 0;

	open_end(&end, form_bits());
	for (int i = 0; i < 60000; i++) {
		struct fid_mr *mr = reg(&end, buffer, 16 * PAGE, ALL_ACCESS, (uint64_t)i * 0x10001);

		MUST(fi_close(&mr->fid));
		if (i == 10000)
			before = resident_kib();
	}
	HOLDS(resident_kib() - before < 2048, "50,000 regions leave %ld KiB", resident_kib() - before);
	close_end(&end);
}

/* Neither side keeps memory for keys that were used and closed. */
static void used_and_closed_keys_are_forgotten(void)
{
	enum { ROUNDS_OF_ALL = 200, COUNT = 256 };
	static struct fid_mr *mrs[COUNT];
	static struct remote to[COUNT];
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true), byte = 7;
	bool target = connected(&end, form_bits());
	long before = 0;

	for (uint64_t i = 0; i < ROUNDS_OF_ALL && !failures; i++) {
		for (uint64_t n = 0; n < COUNT; n++)
			if (target) {
				mrs[n] = reg(&end, buffer, PAGE, ALL_ACCESS, 0x100001 * (COUNT * i + n));
				tell_region(&end, mrs[n], buffer);
			} else {
				to[n] = hear_region(&end);
				IS(do_write(&end, &byte, 1, &to[n], 0), 0);
			}
		meet();
		for (uint64_t n = 0; n < COUNT; n++)
			if (target)
				MUST(fi_close(&mrs[n]->fid));
			else
				forget_region(&end, &to[n]);
		meet();
		if (i == ROUNDS_OF_ALL / 4)
			before = resident_kib();
	}
	HOLDS(resident_kib() - before < 1024, "%d keys leave %ld KiB", ROUNDS_OF_ALL * COUNT * 3 / 4, resident_kib() - before);
	meet();
	close_end(&end);
}

/* A killed peer delays no close, and a living peer's connection continues. */
static void a_killed_peer_and_a_living_one(bool stopped)
{
	struct end end = { 0 }, second = { 0 };
	uint8_t *buffer = pages(2 * PAGE, true), byte = 7;
	int living_wire, dead_wire, status;
	pid_t living, other;

	/* both initiators are forked before libfabric is used, and connect one after the other */
	if (!split())
		goto initiator;
	living = initiator_pid;
	living_wire = wire;
	if (!split()) {
		close(living_wire);
		goto initiator;
	}
	other = initiator_pid;
	open_end(&end, form_bits());
	second.ep = connect_more(&end, true);
	dead_wire = wire;
	wire = living_wire;
	end.ep = connect_more(&end, true);
	struct fid_mr *stays = reg(&end, buffer, PAGE, ALL_ACCESS, 1), *mr = reg(&end, buffer + PAGE, PAGE, ALL_ACCESS, 2);
	int wires[2] = { living_wire, dead_wire };
	double start, longest = 0;

	for (int i = 0; i < 2; i++) {
		wire = wires[i];
		tell_region(&end, stays, buffer);
		tell_region(&end, mr, buffer + PAGE);
		meet();
	}
	kill(other, stopped ? SIGSTOP : SIGKILL);
	for (int i = 0; i < ROUNDS; i++) {
		start = now();
		MUST(fi_close(&mr->fid));
		if (now() - start > longest)
			longest = now() - start;
		mr = reg(&end, buffer + PAGE, PAGE, ALL_ACCESS, 2);
	}
	HOLDS(longest < (stopped ? 5.5 : 0.5), "a close took %.3f s", longest);
	if (stopped)
		kill(other, SIGKILL);
	wire = living_wire;
	meet();
	meet();
	IS(buffer[1], 7);
	MUST(fi_close(&mr->fid));
	MUST(fi_close(&stays->fid));
	waitpid(other, &status, 0);
	MUST(fi_close(&second.ep->fid));
	initiator_pid = living;
	meet();
	close_end(&end);
	return;
initiator:
	open_end(&end, form_bits());
	end.ep = connect_more(&end, false);
	struct remote to = hear_region(&end), goes = hear_region(&end);

	IS(do_write(&end, &byte, 1, &to, 0), 0);
	IS(do_write(&end, &byte, 1, &goes, 0), 0);
	meet();
	meet(); /* the killed initiator does not return from this */
	IS(do_write(&end, &byte, 1, &to, 1), 0);
	meet();
	forget_region(&end, &to);
	forget_region(&end, &goes);
	meet();
	close_end(&end);
}

static void a_killed_peer(void) { a_killed_peer_and_a_living_one(false); }
static void a_stopped_peer_beside_another(void) { a_killed_peer_and_a_living_one(true); }

/* After the close any access of a peer is an error at the peer, the key can be used again, and the
 * connection stays. */
static void access_behind_the_close(void)
{
	struct end end = { .caps = FI_MSG | FI_RMA | FI_ATOMIC };
	uint8_t *buffer = pages(2 * PAGE, true), byte = 7;
	uint64_t old;

	if (connected(&end, form_bits())) {
		struct fid_mr *stays = reg(&end, buffer, PAGE, ALL_ACCESS, 1), *mr;

		tell_region(&end, stays, buffer);
		mr = reg(&end, buffer + PAGE, PAGE, ALL_ACCESS, 2);
		tell_region(&end, mr, buffer + PAGE);
		meet();
		MUST(fi_close(&mr->fid));
		meet();
		meet();
		IS(next_event(&end, 0.2, NULL), -1);
		IS(buffer[PAGE], 7);
		IS(buffer[0], 9);
		mr = reg(&end, buffer + PAGE, PAGE, ALL_ACCESS, 2);
		tell_region(&end, mr, buffer + PAGE);
		meet();
		IS(buffer[PAGE + 1], 10);
		MUST(fi_close(&mr->fid));
		MUST(fi_close(&stays->fid));
	} else {
		struct remote stays = hear_region(&end), goes = hear_region(&end), again;

		IS(do_write(&end, &byte, 1, &goes, 0), 0);
		meet();
		meet();
		byte = 8;
		HOLDS(refused(&end, do_write(&end, &byte, 1, &goes, 0)), "a write is not refused");
		HOLDS(refused(&end, do_read(&end, &byte, 1, &goes, 0)), "a read is not refused");
		HOLDS(refused(&end, do_fetch_add(&end, 1, &old, &goes, 8)), "an atomic is not refused");
		byte = 9;
		IS(do_write(&end, &byte, 1, &stays, 0), 0);
		meet();
		again = hear_region(&end);
		byte = 10;
		IS(do_write(&end, &byte, 1, &again, 1), 0);
		meet();
		forget_region(&end, &stays);
		forget_region(&end, &goes);
		forget_region(&end, &again);
	}
	close_end(&end);
}

/* With the device's own keys the access is an error at the peer as well, and writes nothing; the
 * connection ends. */
static void access_behind_the_close_of_a_native_key(void)
{
	struct end end = { 0 };
	uint8_t *buffer = pages(PAGE, true), byte = 7;

	if (connected(&end, form_bits())) {
		struct fid_mr *mr = reg(&end, buffer, PAGE, ALL_ACCESS, 0);

		tell_region(&end, mr, buffer);
		meet();
		MUST(fi_close(&mr->fid));
		meet();
		meet();
		IS(buffer[0], 7);
	} else {
		struct remote to = hear_region(&end);

		IS(do_write(&end, &byte, 1, &to, 0), 0);
		meet();
		meet();
		byte = 8;
		HOLDS(do_write(&end, &byte, 1, &to, 0) > 0, "a write is not refused");
		meet();
		forget_region(&end, &to);
	}
	close_end(&end);
}

static const struct test tests[] = {
	CASE(idle_peer_sleeps, "native keys handles raw rawkeys"),
	CASE(idle_peer_polls, "keys handles"),
	CASE(idle_peer_sends, "keys"),
	CASE(idle_peer_computes, "keys"),
	CASE(idle_peer_while_refreshed, "keys notify"),
	CASE(stopped_peer, "keys handles"),
	CASE(closed_while_written, "keys handles virtual rawkeys"),
	CASE(closed_while_read, "keys handles"),
	CASE(closed_while_added_to, "keys"),
	CASE(closing_releases_all, "keys handles native rawkeys"),
	CASE(used_and_closed_keys_are_forgotten, "keys handles native rawkeys"),
	CASE(a_killed_peer, "keys"),
	CASE(a_stopped_peer_beside_another, "keys"),
	CASE(access_behind_the_close, "keys handles virtual rawkeys"),
	CASE(access_behind_the_close_of_a_native_key, "native raw"),
	{ 0 },
};
