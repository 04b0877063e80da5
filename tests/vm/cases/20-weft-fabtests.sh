# guest: large
# needs: weft fabtests
# seconds: 420
# long: fi_multi_ep with FI_THREAD_COMPLETION, transfers without verification, regions
# libfabric's fabtests of message endpoints on rxe0. Five are made smaller, because the resources of
# rxe and of this guest do not suffice (libfabric's verbs provider fails in the same way in this
# guest): fi_cq_test opens 32,768 queues, which take more than 6 GB of kernel memory; fi_msg_bw,
# fi_msg_pingpong, fi_rma_bw and fi_multi_ep register 64 buffers of 8 MiB each way in one region
# (fi_multi_ep uses 256 bytes of it), for whose page list rxe allocates more than 4 MiB at once
# (ENOMEM, and a warning in the kernel's log). Tests that repeat others with more iterations run on
# soft0 only, unless WEFT_VM_ALL is set: each takes more than 10 minutes on a busy host.
run() {
	only='_test|g00n13s|^fi_msg$|epoll|sockets|cm_data|cq_data|shared_ctx|multi_ep((?!completion).)*$|flood| -I 5 -v'
	[ -n "$WEFT_VM_LONG" ] &&
		only='_test|g00n13s|^fi_msg$|epoll|sockets|cm_data|cq_data|shared_ctx|multi_ep|multi_mr|unmap_mem|flood| -I 5'
	limit=120
	[ -n "$WEFT_VM_ALL" ] && only='.' limit=1800
	fabtests msg "$only" --seconds $limit \
		--more '^fi_cq_test=-L 1024' --more 'msg_bw|msg_pingpong|rma_bw=-W 8' --more 'multi_ep=-S 256'
}
