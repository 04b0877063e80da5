/* register: registers -z bytes and prints the result as `fi_mr_reg RESULT`; exits with 0 in any
 * case. The tests run it under RLIMIT_MEMLOCK. */
#include "peer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int test_register(const struct options *opt)
{
	struct peer p;
	struct fid_mr *mr = NULL;
	void *buf = NULL;
	peer_open(&p, opt);
	check("fi_domain", fi_domain(p.fabric, p.info, &p.domain, NULL));
	check("posix_memalign", posix_memalign(&buf, 4096, opt->size));
	memset(buf, 1, opt->size);
	int ret = fi_mr_reg(p.domain, buf, opt->size, FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE, 0, 0, 0, &mr, NULL);
	printf("fi_mr_reg %d %s\n", ret, fi_strerror(ret < 0 ? -ret : ret));
	if (!ret)
		check("close mr", fi_close(&mr->fid));
	check("close domain", fi_close(&p.domain->fid));
	check("close eq", fi_close(&p.eq->fid));
	check("close fabric", fi_close(&p.fabric->fid));
	fi_freeinfo(p.info);
	free(buf);
	return 0;
}
