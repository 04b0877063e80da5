/* reads: both sides have several reads and numbered messages under way; each read is compared with
 * the bytes of the region, and messages must come in their order. `-m send`: messages alone. On a
 * link that loses packets this shows whether the device repeats its requests correctly; it runs on
 * libfabric's verbs provider, too. */
#include "peer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { AT_ONCE = 4, MESSAGE = 3000 };

extern const char *survive_mode;

static unsigned char byte_of(size_t i) { return (unsigned char)(i * 7 + (i >> 8) + (i >> 16) * 3); }

static void compare(const unsigned char *at, size_t len, int number)
{
	for (size_t i = 0; i < len; i++)
		if (at[i] != byte_of(i)) {
			printf("FAILED: read %d of %zu bytes completed with success; byte %zu is %02x, not %02x\n", number, len, i, at[i], byte_of(i));
			fflush(stdout);
			_exit(1);
		}
}

int test_reads(const struct options *opt)
{
	size_t len = opt->size;
	struct peer p;
	struct done d;
	struct fid_mr *mr;
	char *areas = NULL;
	int wanted = strcmp(survive_mode, "read") ? 0 : opt->iterations, reads = 0, posted = 0, messages = 0, under_way = 0, got = 0;

	peer_open(&p, opt);
	peer_connect(&p);
	check("posix_memalign", posix_memalign((void **)&areas, 4096, AT_ONCE * (len + MESSAGE)));
	check("fi_mr_reg", fi_mr_reg(p.domain, areas, AT_ONCE * (len + MESSAGE), FI_READ | FI_SEND, 0, 0, 0, &mr, NULL));
	for (size_t i = 0; i < len; i++)
		peer_rma_area(&p)[i] = (char)byte_of(i);
	peer_send(&p, 1);
	peer_post_rx(&p, peer_recv(&p, 1));
	while (reads < wanted || under_way || messages < opt->iterations || got < opt->iterations) {
		if (posted < wanted && posted - reads < AT_ONCE) {
			char *at = areas + (size_t)(posted % AT_ONCE) * len;
			memset(at, 0, len);
			long ret = fi_read(p.ep, at, len, fi_mr_desc(mr), 0, p.remote_addr, p.remote_key, at);
			if (!ret)
				posted++;
			else if (ret != -FI_EAGAIN)
				fail("fi_read", ret);
		}
		if (messages < opt->iterations && under_way < AT_ONCE && messages - got < AT_ONCE) {
			char *at = areas + AT_ONCE * len + (size_t)(messages % AT_ONCE) * MESSAGE;
			memcpy(at, &messages, sizeof messages);
			long ret = fi_send(p.ep, at, MESSAGE, fi_mr_desc(mr), 0, NULL);
			if (!ret) {
				messages++;
				under_way++;
			} else if (ret != -FI_EAGAIN) {
				fail("fi_send", ret);
			}
		}
		if (cq_poll(p.tx, &d)) {
			if (d.err)
				fail("completion", -d.err);
			if (d.context)
				compare(d.context, len, reads++);
			else
				under_way--;
		}
		/* the other side may have ended its loop, and sent its last message */
		if (got < opt->iterations && cq_poll(p.rx, &d)) {
			if (d.err)
				fail("receive", -d.err);
			if (d.len != MESSAGE || memcmp(d.context, &got, sizeof got)) {
				printf("FAILED: message %d of %zu bytes instead of message %d\n", *(int *)d.context, d.len, got);
				fflush(stdout);
				_exit(1);
			}
			got++;
			peer_post_rx(&p, (int)(((char *)d.context - p.buf) / (ptrdiff_t)p.size));
		}
	}
	peer_send(&p, 1);
	peer_recv(&p, 1);
	peer_shutdown_pair(&p);
	check("close mr", fi_close(&mr->fid));
	peer_close(&p);
	printf("reads: ok, %d reads, %d messages\n", reads, got);
	free(areas);
	return 0;
}
