/* Two processes with a message endpoint each, and a third that stops or kills one of them.
 *
 *   peers stopped PROV NODE   the target is stopped by SIGSTOP while the initiator writes and reads
 *                             its memory
 *   peers busy PROV NODE      the target is killed in the middle of writes: error completions and
 *                             FI_SHUTDOWN
 *   peers idle PROV NODE      the target is killed while no operation is pending: FI_SHUTDOWN
 *
 * Exits with 0, or prints the failure. Needs only libfabric 1.17; runs on any provider with
 * FI_EP_MSG and FI_RMA. */
#include "end.h"

/* ---- the target: registers its memory, and then makes no more calls ---- */

static void target(const char *mode, int out)
{
	struct end end = { .info = getinfo("0", FI_SOURCE) };
	struct fid_pep *pep;
	struct fi_info *request;
	struct remote remote;
	uint8_t name[128] = { 0 };
	size_t size = sizeof name;

	open_fabric(&end);
	MUST(fi_passive_ep(end.fabric, end.info, &pep, NULL));
	MUST(fi_pep_bind(pep, &end.eq->fid, 0));
	MUST(fi_listen(pep));
	MUST(fi_getname(&pep->fid, name, &size));
	tell(out, name, sizeof name);

	expect(&end, FI_CONNREQ, &request);
	open_endpoint(&end, request);
	MUST(fi_accept(end.ep, NULL, 0));
	expect(&end, FI_CONNECTED, NULL);
	remote.key = fi_mr_key(end.mr);
	remote.addr = end.info->domain_attr->mr_mode & FI_MR_VIRT_ADDR ? (uintptr_t)end.memory : 0;
	tell(out, &remote, sizeof remote);
	if (strcmp(mode, "stopped"))
		for (;;) /* until killed: awake, but not in a libfabric call */
			pause();

	raise(SIGSTOP);
	/* after SIGCONT: the initiator's last pattern is in memory */
	for (size_t i = 0; i < MEMORY; i++)
		if (end.memory[i] != (uint8_t)(i * 7 + 3))
			die("byte %zu is %d", i, end.memory[i]);
	exit(0);
}

/* ---- the initiator ---- */

static void one_sided(struct end *end, struct remote remote)
{
	static const size_t sizes[] = { 1, 8, 64, 4096, 65536, MEMORY / 2 };
	void *desc = fi_mr_desc(end->mr);
	uint8_t *from = end->memory, *back = end->memory + MEMORY / 2;

	for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++) {
		for (size_t i = 0; i < sizes[n]; i++)
			from[i] = (uint8_t)(i * 11 + n);
		memset(back, 0, sizes[n]);
		MUST(fi_write(end->ep, from, sizes[n], desc, 0, remote.addr + 5, remote.key, NULL));
		if (completion(end, 5))
			die("write of %zu bytes ended in error", sizes[n]);
		MUST(fi_read(end->ep, back, sizes[n], desc, 0, remote.addr + 5, remote.key, NULL));
		if (completion(end, 5))
			die("read of %zu bytes ended in error", sizes[n]);
		if (memcmp(from, back, sizes[n]))
			die("%zu bytes came back changed", sizes[n]);
	}
	for (size_t i = 0; i < MEMORY; i++)
		end->memory[i] = (uint8_t)(i * 7 + 3);
	MUST(fi_write(end->ep, end->memory, MEMORY, desc, 0, remote.addr, remote.key, NULL));
	if (completion(end, 5))
		die("the last write ended in error");
}

/* Writes until the target is dead: then errors and FI_SHUTDOWN come, and no call hangs. */
static void until_killed(struct end *end, struct remote remote, int out)
{
	double limit = 0;
	int failed = 0, kind;
	void *desc = fi_mr_desc(end->mr);

	for (unsigned n = 0; !failed; n++) {
		ssize_t posted = fi_write(end->ep, end->memory, 65536, desc, 0, remote.addr, remote.key, NULL);

		if (posted < 0 && posted != -FI_EAGAIN) {
			/* the provider has already disconnected the endpoint */
			failed = (int)-posted;
			break;
		}
		if (posted == 0)
			failed = completion(end, 10);
		if (n == 100) {
			tell(out, "k", 1); /* writes are pending: the parent kills the target */
			limit = now() + 20;
		}
		if (limit && now() > limit)
			die("writes to a dead process still succeed");
	}
	kind = event(end, 10, NULL);
	if (kind != FI_SHUTDOWN)
		die("event %d after the peer's death, not FI_SHUTDOWN", kind);
	printf("error completion: %s; then FI_SHUTDOWN\n", fi_strerror(failed));
}

static void until_shutdown(struct end *end, int out)
{
	double start;
	int kind;

	tell(out, "k", 1);
	start = now();
	kind = event(end, 10, NULL);
	if (kind != FI_SHUTDOWN)
		die("event %d after the peer's death, not FI_SHUTDOWN", kind);
	if (now() - start > 2) /* one second, and another for a machine under load */
		die("FI_SHUTDOWN took %.1f s", now() - start);
	printf("FI_SHUTDOWN after %.3f s\n", now() - start);
}

static void initiator(const char *mode, int in, int go, int out)
{
	struct end end = { 0 };
	struct remote remote;
	uint8_t name[128];
	char start;

	hear(in, name, sizeof name);
	end.info = getinfo(NULL, 0);
	open_fabric(&end);
	open_endpoint(&end, end.info);
	MUST(fi_connect(end.ep, name, NULL, 0));
	expect(&end, FI_CONNECTED, NULL);
	hear(in, &remote, sizeof remote);
	tell(out, "c", 1);
	hear(go, &start, 1);
	if (!strcmp(mode, "stopped"))
		one_sided(&end, remote);
	else if (!strcmp(mode, "busy"))
		until_killed(&end, remote, out);
	else
		until_shutdown(&end, out);
	close_end(&end);
	exit(0);
}

int main(int argc, char **argv)
{
	int to_initiator[2], go[2], done[2], status;
	pid_t target_pid, initiator_pid;
	char byte;

	if (argc != 4)
		die("usage: peers stopped|busy|idle PROV NODE");
	provider = argv[2];
	node = argv[3];
	setvbuf(stdout, NULL, _IONBF, 0);
	if (pipe(to_initiator) || pipe(go) || pipe(done))
		die("pipe: %s", strerror(errno));
	if (!(target_pid = child("target")))
		target(argv[1], to_initiator[1]);
	if (!(initiator_pid = child("initiator"))) {
		close(to_initiator[1]);
		close(go[1]);
		initiator(argv[1], to_initiator[0], go[0], done[1]);
	}
	role = "parent";
	close(to_initiator[1]);
	close(done[1]);
	hear(done[0], &byte, 1);
	if (!strcmp(argv[1], "stopped")) {
		if (waitpid(target_pid, &status, WUNTRACED) != target_pid || !WIFSTOPPED(status))
			die("the target was not stopped");
		tell(go[1], "g", 1);
		if ((status = status_of(initiator_pid, "initiator")) != 0) {
			kill(target_pid, SIGKILL);
			return status;
		}
		kill(target_pid, SIGCONT);
		return status_of(target_pid, "target");
	}
	tell(go[1], "g", 1);
	hear(done[0], &byte, 1);
	kill(target_pid, SIGKILL);
	waitpid(target_pid, &status, 0);
	return status_of(initiator_pid, "initiator");
}
